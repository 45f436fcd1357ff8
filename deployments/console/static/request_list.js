// All unfinished requests of the cluster, each with a button that cancels it.

import { describeError, remove } from "./api.js";
import { announce, find, make, reconcile, setText } from "./dom.js";
import { formatSeconds, shorten } from "./format.js";

/** @typedef {import("./types.js").ClusterState} ClusterState */
/** @typedef {import("./types.js").WaitingRequest} WaitingRequest */

const COLUMNS = ["Request", "Model", "Size", "Steps", "State", "Age", "Deadline", ""];

export class RequestList {
  constructor() {
    this.body = make("tbody");
    const head = COLUMNS.map((name) => (name ? make("th", { scope: "col" }, name) : make("td")));
    const table = make("table", {}, make("thead", {}, make("tr", {}, ...head)), this.body);
    this.scroll = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Unfinished requests" }, table);
    this.note = make("p", { class: "quiet" });
    find("request-list", HTMLDivElement).append(this.scroll, this.note);
  }

  /** @param {ClusterState} state */
  show(state) {
    const more = state.num_requests - state.requests.length;
    setText(this.note, state.num_requests === 0 ? "Nothing waits and nothing runs." : more > 0 ? `and ${more} more` : "");
    this.note.hidden = this.note.textContent === "";
    this.scroll.hidden = state.num_requests === 0;
    reconcile(
      this.body,
      state.requests,
      (request) => request.request_id,
      (request) => makeRow(request),
      (row, request) => updateRow(row, request, state.now_s),
    );
  }
}

/** @param {WaitingRequest} request */
function makeRow(request) {
  const id = request.request_id;
  const button = make("button", { type: "button", class: "small", "aria-label": `Cancel request ${id}` }, "Cancel");
  button.addEventListener("click", () => void cancel(button, id));
  const cells = COLUMNS.slice(0, -1).map(() => make("td"));
  return make("tr", { title: id }, ...cells, make("td", {}, button));
}

/** @param {HTMLElement} row @param {WaitingRequest} request @param {number} now */
function updateRow(row, request, now) {
  const left = request.deadline_s - now;
  const texts = [
    shorten(request.request_id),
    request.model,
    request.size,
    `${request.steps_done} of ${request.num_steps}`,
    request.running ? "running" : "waiting",
    formatSeconds(Math.max(0, now - request.arrival_s)),
    left > 0 ? `in ${formatSeconds(left)}` : `${formatSeconds(-left)} ago`,
  ];
  texts.forEach((text, index) => {
    const cell = row.children[index];
    if (cell instanceof HTMLElement) setText(cell, text);
  });
}

/** @param {HTMLButtonElement} button @param {string} id */
async function cancel(button, id) {
  button.disabled = true;
  try {
    await remove(`v1/requests/${encodeURIComponent(id)}`);
    announce(`Request ${id} is cancelled`);
  } catch (error) {
    button.title = describeError(error);
    announce(describeError(error));
  }
}
