// The form: what may be asked of each model, and the body of a request.

import { find, make, setText } from "./dom.js";
import { formatSeconds } from "./format.js";
import { MoreSettings } from "./more_settings.js";
import { QuoteLine } from "./quote_line.js";

/** @typedef {import("./types.js").Model} Model */
/** @typedef {import("./types.js").Images} Images */
/** @typedef {{model: Model, fields: Record<string, unknown>, images: Images | null}} Wish */

/** Sides that the list of sizes offers, where the model can make them. */
const SIDES = [64, 128, 256, 512, 768, 1024];
/** About two previews a second. */
const PREVIEW_INTERVAL_MS = 500;

export class Composer {
  /** @param {(wish: Wish) => void} onWish */
  constructor(onWish) {
    this.form = find("composer", HTMLFormElement);
    this.prompt = find("prompt", HTMLTextAreaElement);
    this.model = find("model", HTMLSelectElement);
    this.size = find("size", HTMLInputElement);
    this.steps = find("steps", HTMLInputElement);
    this.seed = find("seed", HTMLInputElement);
    this.deadline = find("deadline", HTMLInputElement);
    this.count = find("count", HTMLInputElement);
    this.frames = find("frames", HTMLInputElement);
    this.rate = find("rate", HTMLInputElement);
    this.image = find("image", HTMLInputElement);
    this.mask = find("mask", HTMLInputElement);
    this.strength = find("strength", HTMLInputElement);
    this.problem = find("composer-problem", HTMLParagraphElement);
    /** @type {Model[]} */
    this.models = [];
    this.more = new MoreSettings();
    this.quote = new QuoteLine(this.form);
    // A field tells of its change when it is left: half a number is no wish.
    this.form.addEventListener("change", (event) => {
      if (event.target === this.model) this.fit();
      if (event.target !== this.prompt) this.ask();
    });
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      const wish = this.read();
      if (wish === null) return;
      onWish(wish);
      this.ask();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
    });
  }

  /** @param {Model[]} models those that are served */
  offer(models) {
    // Asked for again and again: what somebody is choosing from must not change under the hand.
    if (JSON.stringify(models) === JSON.stringify(this.models)) return;
    const chosen = this.model.value;
    this.models = models;
    this.model.replaceChildren(
      ...models.map((model) => make("option", { value: model.id }, `${model.id} (${model.output_modality})`)),
    );
    if (models.some((model) => model.id === chosen)) this.model.value = chosen;
    this.fit();
    this.ask();
  }

  /** @param {string} text */
  complain(text) {
    this.problem.textContent = text;
    this.problem.hidden = text === "";
  }

  /** @returns {Model | undefined} */
  get chosen() {
    return this.models.find((model) => model.id === this.model.value);
  }

  /** Fit the fields to the model. */
  fit() {
    const model = this.chosen;
    if (model === undefined) return;
    const { limits, defaults } = model;
    const isVideo = model.output_modality === "video";
    const takesImage = model.input_images.max > 0;
    const needsImage = model.input_images.min > 0;
    const sides = SIDES.filter(
      (side) =>
        side >= limits.min_side &&
        side <= limits.max_side &&
        side * side <= limits.max_pixels &&
        side % limits.size_multiple === 0,
    );
    find("sizes", HTMLDataListElement).replaceChildren(
      ...sides.map((side) => make("option", { value: `${side}x${side}` })),
    );
    this.prompt.maxLength = limits.max_prompt_chars;
    this.size.placeholder = needsImage ? "as the input image" : defaults.size;
    this.steps.placeholder = String(defaults.num_inference_steps);
    this.steps.max = String(limits.max_steps);
    this.count.max = String(limits.max_outputs);
    this.frames.placeholder = String(defaults.num_frames ?? "");
    this.frames.max = String(limits.max_frames ?? "");
    this.frames.step = String(limits.frame_multiple ?? 1); // counted from 1, the least
    this.rate.placeholder = String(defaults.fps ?? "");
    this.image.required = needsImage;
    this.image.multiple = model.input_images.max > 1;
    this.mask.required = model.needs_mask;
    this.strength.placeholder = String(defaults.strength ?? "");
    this.more.fit(model);
    for (const [field, isShown] of /** @type {[HTMLInputElement, boolean][]} */ ([
      [this.frames, isVideo],
      [this.rate, isVideo],
      [this.count, !isVideo],
      [this.image, takesImage],
      [this.mask, model.takes_mask],
      [this.strength, defaults.strength !== undefined],
    ])) {
      find(`${field.id}-field`, HTMLDivElement).hidden = !isShown;
      field.disabled = !isShown; // what nobody sees must not keep the form from being sent
    }
  }

  /** Say when what is in the form would be ready. */
  ask() {
    const model = this.chosen;
    const isWhole = [...this.form.elements].every(
      (field) => field === this.prompt || field === this.image || field === this.mask || isValid(field),
    );
    if (model === undefined || !isWhole) return void this.quote.show(null);
    const fields = this.readTimed(model);
    setText(find("frames-hint", HTMLParagraphElement), describeLength(model, fields));
    // The size of an edit is that of its image, which is not sent for a quote.
    const hasSize = "size" in fields || model.input_images.min === 0;
    void this.quote.show(hasSize ? fields : null);
  }

  /** The fields that matter to the time of a request. @param {Model} model @returns {Record<string, unknown>} */
  readTimed(model) {
    const isVideo = model.output_modality === "video";
    /** @type {Record<string, unknown>} */
    const fields = { model: model.id, ...this.more.read() };
    const size = this.size.value.replace(/\s/g, "").replace("×", "x");
    if (size) fields["size"] = size;
    if (this.steps.value) fields["num_inference_steps"] = this.steps.valueAsNumber;
    if (this.deadline.value) fields["slo_ms"] = this.deadline.valueAsNumber * 1000;
    if (isVideo && this.frames.value) fields["num_frames"] = this.frames.valueAsNumber;
    if (isVideo && this.rate.value) fields["fps"] = this.rate.valueAsNumber;
    if (!isVideo && this.count.value && this.count.value !== "1") fields["n"] = this.count.valueAsNumber;
    // Without it a quote would be that of a request from text alone.
    const startsFromImage = model.defaults.strength !== undefined && Boolean(this.image.files?.length);
    if (startsFromImage) fields["strength"] = this.readStrength(model);
    return fields;
  }

  /** How far an image is changed. @param {Model} model */
  readStrength({ defaults }) {
    if (this.strength.value) return this.strength.valueAsNumber;
    return this.mask.files?.length ? defaults.masked_strength : defaults.strength;
  }

  /** @returns {Wish | null} */
  read() {
    const model = this.chosen;
    if (model === undefined) {
      this.complain("No model is served at the moment.");
      return null;
    }
    this.complain("");
    const isVideo = model.output_modality === "video";
    /** @type {Record<string, unknown>} */
    const fields = { ...this.readTimed(model), prompt: this.prompt.value };
    if (this.seed.value) fields["seed"] = this.seed.valueAsNumber;
    if (!isVideo) {
      fields["stream"] = true;
      fields["preview_interval_ms"] = PREVIEW_INTERVAL_MS;
    }
    const files = model.input_images.max > 0 ? [...(this.image.files ?? [])] : [];
    const name = isVideo ? "input_reference" : "image";
    const mask = (model.takes_mask && this.mask.files?.[0]) || null;
    return { model, fields, images: files.length > 0 ? { name, files, mask } : null };
  }
}

/** @param {Element} field */
function isValid(field) {
  const { validity } = /** @type {HTMLInputElement} */ (field);
  return validity.valid;
}

/** The length of a video. @param {Model} model @param {Record<string, unknown>} fields */
function describeLength(model, fields) {
  const [frames, rate] = [fields["num_frames"] ?? model.defaults.num_frames, fields["fps"] ?? model.defaults.fps];
  return frames && rate ? `${formatSeconds(Number(frames) / Number(rate))} long` : "";
}
