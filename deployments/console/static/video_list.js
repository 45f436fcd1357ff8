// The video jobs of the service: they outlive this page and the service itself.

import { describeError, getJson, locate, remove } from "./api.js";
import { announce, find, make, reconcile, setText } from "./dom.js";
import { formatClock } from "./format.js";

/** @typedef {import("./types.js").VideoJob} VideoJob */

const BUSY_MS = 1500;
const IDLE_MS = 8000;
const WORDS = { queued: "waits", in_progress: "runs", completed: "done", failed: "failed" };

export class VideoList {
  constructor() {
    this.list = find("video-list", HTMLUListElement);
    this.empty = find("video-empty", HTMLParagraphElement);
    this.timer = 0;
  }

  /** Ask for the jobs now, and again and again. */
  async follow() {
    clearTimeout(this.timer);
    let isBusy = false;
    if (!document.hidden) {
      try {
        const jobs = /** @type {VideoJob[]} */ ((await getJson("v1/videos?limit=20")).data);
        isBusy = jobs.some(isUnfinished);
        this.show(jobs);
      } catch (error) {
        this.empty.hidden = false;
        setText(this.empty, describeError(error));
      }
    }
    this.timer = window.setTimeout(() => void this.follow(), isBusy ? BUSY_MS : IDLE_MS);
  }

  /** @param {VideoJob[]} jobs */
  show(jobs) {
    this.empty.hidden = jobs.length > 0;
    setText(this.empty, "No video jobs.");
    reconcile(
      this.list,
      jobs,
      (job) => job.id,
      (job) => this.makeItem(job),
      (item, job) => this.update(item, job),
    );
  }

  /** @param {VideoJob} job */
  makeItem(job) {
    const row = make(
      "div",
      { class: "row" },
      make("strong", {}, job.prompt),
      make("span", { class: "quiet" }, `${job.model}, ${job.size}, ${job.num_frames} frames, ${formatClock(job.created_at)}`),
      make("span", { class: "state" }),
      make("button", { type: "button", class: "small play", hidden: true, onclick: () => this.play(job) }, "Play"),
      make("button", { type: "button", class: "small end", onclick: () => void this.end(job) }, "Cancel"),
    );
    return make("li", {}, row, make("progress", { max: 100, "aria-label": `Steps of ${job.prompt}` }));
  }

  /** @param {HTMLElement} item @param {VideoJob} job */
  update(item, job) {
    const state = item.querySelector(".state");
    const [bar, play, end] = [item.querySelector("progress"), item.querySelector(".play"), item.querySelector(".end")];
    if (!(state instanceof HTMLElement) || !bar || !(play instanceof HTMLButtonElement) || !(end instanceof HTMLElement)) return;
    const why = job.error ? `: ${job.error.message}` : job.status === "in_progress" ? `, ${job.progress} %` : "";
    setText(state, `${WORDS[job.status]}${why}`);
    state.classList.toggle("problem", job.status === "failed" && job.error?.code !== "cancelled");
    bar.hidden = !isUnfinished(job);
    bar.value = job.progress;
    play.hidden = job.status !== "completed" || item.querySelector("video") !== null;
    setText(end, isUnfinished(job) ? "Cancel" : "Remove");
    end.setAttribute("aria-label", `${isUnfinished(job) ? "Cancel" : "Remove"} the video of ${job.prompt}`);
  }

  /** Show a video in its place. @param {VideoJob} job */
  play(job) {
    const item = [...this.list.children].find((child) => /** @type {HTMLElement} */ (child).dataset["key"] === job.id);
    if (item === undefined || item.querySelector("video")) return;
    const source = locate(`v1/videos/${encodeURIComponent(job.id)}/content`);
    const video = make("video", { src: source, controls: true, autoplay: true, loop: true, "aria-label": job.prompt });
    video.muted = true;
    item.append(video);
    item.querySelector(".play")?.toggleAttribute("hidden", true);
    video.focus();
  }

  /** Stop a job, or remove one that has ended. @param {VideoJob} job */
  async end(job) {
    try {
      await remove(`v1/videos/${encodeURIComponent(job.id)}`);
    } catch (error) {
      announce(describeError(error));
    }
    await this.follow();
  }
}

/** @param {VideoJob} job */
function isUnfinished(job) {
  return job.status === "queued" || job.status === "in_progress";
}
