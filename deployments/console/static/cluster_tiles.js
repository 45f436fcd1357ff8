// What is known of the cluster beside the map: attainment, the queue, and what happens to placement and workers.

import { find, make, reconcile, setText } from "./dom.js";
import { formatClock, formatSeconds, formatShare } from "./format.js";

/** @typedef {import("./types.js").ClusterState} ClusterState */

/** @param {ClusterState} state */
export function showTiles(state) {
  showAttainment(state);
  showQueue(state);
  showNotices(state);
}

/** @param {ClusterState} state */
function showAttainment(state) {
  const rows = Object.entries(state.attainment).sort();
  const element = find("attainment", HTMLDivElement);
  if (rows.length === 0) {
    element.replaceChildren(make("p", { class: "quiet" }, "No request has ended in the last five minutes."));
    return;
  }
  element.replaceChildren(
    ...rows.map(([model, { on_time, ended, overdue, predicted, predicted_well }]) => {
      const due = ended + overdue;
      const late = overdue ? `, ${overdue} overdue` : "";
      const text = `${formatShare(on_time, due)} (${on_time} of ${due}${late})`;
      return make(
        "div",
        {},
        make("p", {}, make("strong", {}, model), ` ${text}`),
        make("meter", { min: 0, max: due, value: on_time, "aria-label": `${model}: on time ${text}` }),
        predicted === 0
          ? ""
          : make(
              "p",
              { class: "quiet" },
              `Predicted within 30 %: ${formatShare(predicted_well, predicted)} (${predicted_well} of ${predicted})`,
            ),
      );
    }),
  );
}

/** @param {ClusterState} state */
function showQueue(state) {
  const element = find("queue", HTMLDivElement);
  if (state.classes.length === 0) {
    element.replaceChildren(make("p", { class: "quiet" }, "Nothing waits and nothing runs."));
    return;
  }
  const head = ["Class", "Waiting", "Running", "Longest"].map((name, index) =>
    make("th", { scope: "col", class: index > 0 ? "number" : "" }, name),
  );
  const rows = state.classes.map((entry) => {
    const longest = entry.oldest_s === null ? "" : formatSeconds(state.now_s - entry.oldest_s);
    const figures = [entry.waiting, entry.running, longest].map((figure) =>
      make("td", { class: "number" }, String(figure)),
    );
    return make("tr", {}, make("td", {}, `${entry.model} ${entry.size}`), ...figures);
  });
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
  element.replaceChildren(make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Queue by class" }, table));
}

/** @param {ClusterState} state */
function showNotices(state) {
  const list = find("notices", HTMLOListElement);
  reconcile(
    list,
    [...state.notices].reverse(),
    (notice) => `${notice.at_s} ${notice.text}`,
    (notice) => {
      const time = make("span", { class: "quiet" }, `${formatClock(notice.at_s)} `);
      const what = notice.kind === "placement" ? make("strong", {}, "New placement: ") : "";
      return make("li", {}, time, what, notice.text);
    },
  );
  list.tabIndex = 0;
  if (state.notices.length === 0) list.replaceChildren(make("li", { class: "quiet" }, "Nothing has changed yet."));
}

/** @param {"connecting" | "live" | "lost"} status @param {string} why */
export function showConnection(status, why) {
  const pill = find("connection", HTMLParagraphElement);
  pill.className = `pill ${status}`;
  setText(pill, status === "lost" ? "no connection" : status);
  const problem = find("cluster-problem", HTMLParagraphElement);
  problem.hidden = status !== "lost";
  setText(problem, why);
}
