// When the request in the form would be ready, before it is made.

import { describeError, post } from "./api.js";
import { find, setText } from "./dom.js";
import { formatSeconds } from "./format.js";

/** @typedef {import("./types.js").Quote} Quote */

/** While somebody is at the form, others' requests change what it says. */
const AGAIN_MS = 5000;

export class QuoteLine {
  /** @param {HTMLElement} form asked again while it has the focus */
  constructor(form) {
    this.element = find("quote", HTMLParagraphElement);
    /** @type {Record<string, unknown> | null} */
    this.fields = null;
    this.number = 0;
    setInterval(() => {
      if (document.hasFocus() && form.contains(document.activeElement)) void this.refresh();
    }, AGAIN_MS);
  }

  /** @param {Record<string, unknown> | null} fields those of a request that matter to its time; null shows nothing */
  show(fields) {
    this.fields = fields;
    return this.refresh();
  }

  async refresh() {
    const number = ++this.number;
    const { fields } = this;
    if (fields === null) return setText(this.element, "");
    let text;
    try {
      const { quality, ...others } = fields;
      const asked = quality === undefined ? others : { ...others, qualities: [quality] };
      const answer = await (await post("v1/quotes", asked)).json();
      text = describeQuote(answer.data[0], fields["on_late"] === "refuse");
    } catch (error) {
      text = describeError(error);
    }
    // Answers may come in another order than they were asked for.
    if (number === this.number) setText(this.element, text);
  }
}

/** @param {Quote} quote @param {boolean} isRefused if late */
export function describeQuote(quote, isRefused) {
  if (quote.error !== null) return quote.error.message;
  if (quote.predicted_s === null) return "";
  const ready = `ready in about ${formatSeconds(quote.predicted_s)}`;
  const guess = quote.is_guess ? " (a guess: none like it has ended yet)" : "";
  if (quote.slo_met || quote.slo_s === null) return `Would be ${ready}${guess}.`;
  const late = `${formatSeconds(quote.predicted_s - quote.slo_s)} after its deadline`;
  return `${isRefused ? "Would be refused" : "Would be late"}: ${ready}${guess}, ${late}.`;
}
