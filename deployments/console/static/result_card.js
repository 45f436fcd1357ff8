// One request of this page, from its wish to its result.

import { ServiceError, describeError, getJson, locate, post, readEvents, remove } from "./api.js";
import { announce, make, setText } from "./dom.js";
import { formatCount, formatSeconds } from "./format.js";
import { drawFacts, drawTimeline } from "./timeline.js";

/** @typedef {import("./types.js").Facts} Facts */
/** @typedef {import("./types.js").Preview} Preview */
/** @typedef {import("./types.js").Progress} Progress */
/** @typedef {import("./types.js").Prospect} Prospect */
/** @typedef {import("./types.js").VideoJob} VideoJob */
/** @typedef {import("./composer.js").Wish} Wish */

const POLL_MS = 700;

/** @param {string} base64 @param {string} format */
function makeBlob(base64, format) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  return new Blob([bytes], { type: `image/${format}` });
}

/** @param {Prospect} prospect */
function describeEta(prospect) {
  return typeof prospect.eta_s === "number" ? `, about ${formatSeconds(prospect.eta_s)} left` : "";
}

/** @param {ServiceError} error of a request that would have been late */
function describeRefusal(error) {
  const why =
    error.predictedS === null
      ? error.message
      : `it would be ready in about ${formatSeconds(error.predictedS)}, after its deadline`;
  return `Refused: ${why}. Nothing was computed. More time, fewer steps or a smaller size may help.`;
}

export class ResultCard {
  /** @param {Wish} wish */
  constructor(wish) {
    this.wish = wish;
    this.isVideo = wish.model.output_modality === "video";
    this.requestId = "";
    this.hasEnded = false;
    this.leaving = new AbortController();
    this.blank = make("div", { class: "blank" }, "waiting");
    this.pictures = make("div", { class: "pictures" }, this.blank);
    /** The previews of the images that have not come yet, by index.  @type {Map<number, HTMLCanvasElement>} */
    this.previews = new Map();
    this.bar = make("progress", { max: 1, "aria-label": "Denoising steps" });
    this.status = make("p", { class: "quiet" }, "sent");
    this.facts = make("div", { class: "facts" }, this.bar, this.status);
    this.cancelButton = make("button", { type: "button", class: "small", onclick: () => void this.cancel() }, "Cancel");
    const prompt = String(wish.fields["prompt"]);
    const head = make("header", {}, make("h3", {}, prompt), make("span", { class: "quiet" }, wish.model.id), this.cancelButton);
    this.element = make("article", { class: "card result", "aria-label": `Result for: ${prompt}` }, head, this.pictures, this.facts);
  }

  /** Make the request; returns when it has ended, in whatever way. */
  async run() {
    try {
      await (this.isVideo ? this.followJob() : this.followStream());
    } catch (error) {
      this.fail(error);
    }
    this.hasEnded = true;
    this.cancelButton.remove();
  }

  async cancel() {
    this.cancelButton.disabled = true;
    setText(this.status, "cancelling: the step that runs is finished first");
    try {
      if (this.requestId === "") this.leaving.abort();
      else if (this.isVideo) await remove(`v1/videos/${encodeURIComponent(this.requestId)}`);
      else await remove(`v1/requests/${encodeURIComponent(this.requestId)}`);
    } catch (error) {
      if (!this.hasEnded) setText(this.status, describeError(error));
    }
  }

  async followStream() {
    const { fields, images } = this.wish;
    const answer = await post(images ? "v1/images/edits" : "v1/images/generations", fields, images, this.leaving.signal);
    for await (const event of readEvents(answer)) {
      if (event.error) throw new ServiceError(event.error.message, event.error.code, event.error.predicted_s ?? null);
      const kind = String(event.type).split(".")[1];
      if (kind === "queued") this.queue(event.request_id, event);
      else if (kind === "progress") this.advance(event);
      else if (kind === "partial_image") await this.preview(event);
      else if (kind === "completed") await this.show(event);
    }
    if (this.pictures.contains(this.blank)) throw new ServiceError("The stream ended without a result.", "lost");
  }

  async followJob() {
    const { fields, images } = this.wish;
    /** @type {VideoJob} */
    let job = await (await post("v1/videos", fields, images, this.leaving.signal)).json();
    this.queue(job.id, job);
    while (job.status === "queued" || job.status === "in_progress") {
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
      job = await getJson(`v1/videos/${encodeURIComponent(job.id)}`);
      if (job.status === "in_progress") {
        this.bar.max = 100;
        this.bar.value = job.progress;
        setText(this.status, `${job.progress} % of the denoising steps`);
      }
    }
    if (job.error) throw new ServiceError(job.error.message, job.error.code);
    this.blank.remove();
    const source = locate(`v1/videos/${encodeURIComponent(job.id)}/content`);
    const autoplay = !window.matchMedia("(prefers-reduced-motion: reduce)").matches;
    const video = make("video", { src: source, controls: true, autoplay, loop: true, "aria-label": job.prompt });
    video.muted = true; // the attribute alone mutes no video that a script has made, and browsers start none with sound
    this.pictures.append(video);
    const [width = 0, height = 0] = job.size.split("x").map(Number);
    this.explain(/** @type {Facts} */ ({ ...job, request_id: job.id, width, height }));
  }

  /** @param {string} requestId @param {Prospect} prospect */
  queue(requestId, prospect) {
    this.requestId = requestId;
    this.element.dataset["request"] = requestId;
    const ahead = prospect.queue_position ? ` behind ${formatCount(prospect.queue_position, "request")}` : "";
    setText(this.status, `accepted, waits for workers${ahead}${describeEta(prospect)}`);
  }

  /** @param {Progress} progress */
  advance(progress) {
    this.bar.max = progress.num_steps;
    this.bar.value = progress.step;
    setText(this.status, `step ${progress.step} of ${progress.num_steps}${describeEta(progress)}`);
    setText(this.blank, "denoising");
  }

  /** Show what becomes of an image in the place where it will be. @param {Preview} preview */
  async preview(preview) {
    const bitmap = await createImageBitmap(makeBlob(preview.b64_json, preview.output_format));
    let canvas = this.previews.get(preview.index);
    if (canvas === undefined) {
      canvas = make("canvas", { class: "preview", role: "img", "aria-label": "Preview of the image" });
      this.previews.set(preview.index, canvas);
      this.pictures.append(canvas);
      this.blank.hidden = true;
    }
    canvas.width = bitmap.width;
    canvas.height = bitmap.height;
    canvas.getContext("2d")?.drawImage(bitmap, 0, 0);
    canvas.dataset["step"] = String(preview.step);
    bitmap.close();
  }

  /** @param {Facts & {b64_json: string, index: number}} completed one image of the result */
  async show(completed) {
    const address = URL.createObjectURL(makeBlob(completed.b64_json, "png"));
    this.blank.remove();
    this.previews.get(completed.index)?.remove();
    const prompt = String(this.wish.fields["prompt"]);
    const picture = make("img", { src: address, alt: prompt, width: completed.width, height: completed.height });
    const name = `${completed.request_id}-${completed.index}.png`;
    this.pictures.append(picture, make("a", { href: address, download: name }, "Save the image"));
    if (completed.index === 0) this.explain(completed);
  }

  /** @param {Facts} facts */
  explain(facts) {
    this.bar.remove();
    const latency = facts.latency_s === null ? "" : ` in ${formatSeconds(facts.latency_s)}`;
    const late = facts.slo_met ? "on time" : "after its deadline";
    const text = `done${latency}, ${late}`;
    setText(this.status, text);
    const retries = facts.retries ? `, after ${formatCount(facts.retries, "retry", "retries")}` : "";
    announce(`${this.isVideo ? "Video" : "Image"} ${text}${retries}`);
    this.facts.append(drawTimeline(facts), drawFacts(facts));
  }

  /** @param {unknown} error */
  fail(error) {
    const isCancelled =
      (error instanceof ServiceError && error.code === "cancelled") ||
      (error instanceof DOMException && error.name === "AbortError");
    const isRefused = error instanceof ServiceError && error.code === "deadline_missed";
    this.bar.remove();
    for (const canvas of this.previews.values()) canvas.remove();
    this.blank.hidden = false;
    setText(this.blank, isCancelled ? "cancelled" : isRefused ? "refused" : "no result");
    this.status.className = isCancelled ? "quiet" : "problem";
    setText(this.status, isCancelled ? "cancelled" : isRefused ? describeRefusal(error) : describeError(error));
    announce(this.status.textContent ?? "");
  }
}
