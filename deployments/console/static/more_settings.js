// The settings of a request that most do without, under a heading that is closed at first.

import { describeChoice, getChoices } from "./choices.js";
import { find, make, setText } from "./dom.js";

/** @typedef {import("./choices.js").Choice} Choice */
/** @typedef {import("./types.js").Model} Model */

export class MoreSettings {
  constructor() {
    const details = find("more", HTMLDetailsElement);
    this.guidance = find("guidance", HTMLInputElement);
    this.priority = find("priority", HTMLInputElement);
    /** The lists, by the names of the fields. @type {Record<string, HTMLSelectElement>} */
    this.lists = {
      quality: find("quality", HTMLSelectElement),
      on_late: find("on-late", HTMLSelectElement),
      service_tier: find("tier", HTMLSelectElement),
    };
    this.isOffered = false;
    details.addEventListener("change", () => this.tell());
    // A browser shows what is wrong with a field only where the field is seen.
    details.addEventListener("invalid", () => (details.open = true), true);
  }

  /** Fill the lists with what the service takes, once. */
  async offer() {
    if (this.isOffered) return;
    const choices = await getChoices();
    for (const [name, list] of Object.entries(this.lists)) {
      const { values, usual } = choices[name] ?? { values: [], usual: "" };
      list.replaceChildren(
        ...values.map((value) => make("option", { value: value === usual ? "" : value }, describeChoice(value))),
      );
      find(`${list.id}-field`, HTMLDivElement).hidden = values.length < 2;
    }
    this.isOffered = true;
  }

  /** @param {Model} model */
  fit(model) {
    this.guidance.placeholder = String(model.defaults.guidance_scale);
  }

  /** The fields that are set. @returns {Record<string, unknown>} */
  read() {
    /** @type {Record<string, unknown>} */
    const fields = {};
    if (this.guidance.value) fields["guidance_scale"] = this.guidance.valueAsNumber;
    if (this.priority.value) fields["priority"] = this.priority.valueAsNumber;
    for (const [name, list] of Object.entries(this.lists)) {
      if (list.value) fields[name] = list.value;
    }
    return fields;
  }

  /** Say how many are set, also while they are out of sight. */
  tell() {
    const count = Object.keys(this.read()).length;
    setText(find("more-count", HTMLSpanElement), count > 0 ? `(${count} set)` : "");
  }
}
