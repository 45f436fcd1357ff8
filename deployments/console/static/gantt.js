// The map of the cluster: workers by node, and what each has run in the last minute, runs now and will run.

import { find, make, reconcile, setText } from "./dom.js";
import { formatCount, formatSeconds, shorten } from "./format.js";

/** @typedef {import("./types.js").ClusterState} ClusterState */
/** @typedef {import("./types.js").Worker} Worker */
/** @typedef {{key: string, kind: string, text: string, title: string, start_s: number, end_s: number}} Bar */

/** Seconds that a track shows before and after now. The style of `.mark` has their ratio. */
const BEFORE_S = 30;
const AFTER_S = 15;
const WINDOW_S = BEFORE_S + AFTER_S;
/** Of larger clusters the nodes are closed at first. */
const MAX_OPEN_WORKERS = 48;
const FRAME_MS = 100;
/** The width of a letter on a bar; one that has no room for its text has none. */
const LETTER_PX = 9;

export class Gantt {
  /** @param {() => number} now the service's clock */
  constructor(now) {
    this.now = now;
    this.nodes = find("nodes", HTMLDivElement);
    /** @type {ClusterState | null} */
    this.state = null;
    /** Bars are placed by their distance from this time. */
    this.origin = 0;
    /** @type {Set<string>} */
    this.touched = new Set();
    const calm = window.matchMedia("(prefers-reduced-motion: reduce)");
    let last = 0;
    /** @param {number} time */
    const move = (time) => {
      if (time - last >= (calm.matches ? 1000 : FRAME_MS)) {
        last = time;
        this.move();
      }
      requestAnimationFrame(move);
    };
    requestAnimationFrame(move);
    setInterval(() => this.tell(), 500);
  }

  /** @param {ClusterState} state */
  show(state) {
    if (this.origin === 0) this.origin = state.now_s;
    this.state = state;
    /** @type {Map<string, Worker[]>} */
    const nodes = new Map();
    for (const worker of state.workers) {
      const node = nodes.get(worker.node_id);
      if (node) node.push(worker);
      else nodes.set(worker.node_id, [worker]);
    }
    const bars = listBars(state);
    const isSmall = state.workers.length <= MAX_OPEN_WORKERS;
    reconcile(
      this.nodes,
      nodes,
      ([name]) => name,
      () => this.makeNode(isSmall),
      (element, [name, workers]) => this.updateNode(element, name, workers, bars),
    );
    this.move();
    this.tell();
  }

  /** @param {boolean} isOpen */
  makeNode(isOpen) {
    const rows = make("div");
    const element = make("details", { class: "node", open: isOpen }, make("summary"), rows);
    element.addEventListener("toggle", () => this.state && this.show(this.state));
    return element;
  }

  /** @param {HTMLElement} element @param {string} name @param {Worker[]} workers @param {Map<string, Bar[]>} bars */
  updateNode(element, name, workers, bars) {
    const [summary, rows] = /** @type {HTMLElement[]} */ ([...element.children]);
    if (summary === undefined || rows === undefined) return;
    const busy = workers.filter((worker) => worker.plans.length > 0).length;
    const dead = workers.filter((worker) => !worker.alive).length;
    const lost = dead ? `, ${dead} lost` : "";
    setText(summary, `Node ${shorten(name)}: ${busy} of ${formatCount(workers.length, "worker")} busy${lost}`);
    const isOpen = /** @type {HTMLDetailsElement} */ (element).open;
    reconcile(
      rows,
      isOpen ? workers : [],
      (worker) => worker.worker_id,
      (worker) => makeRow(worker),
      (row, worker) => this.updateRow(row, worker, bars.get(worker.worker_id) ?? []),
    );
  }

  /** @param {HTMLElement} row @param {Worker} worker @param {Bar[]} bars */
  updateRow(row, worker, bars) {
    row.classList.toggle("dead", !worker.alive);
    const [name, track] = /** @type {HTMLElement[]} */ ([...row.children]);
    const placement = name?.lastElementChild;
    if (placement instanceof HTMLElement) setText(placement, worker.placement);
    const band = track?.firstElementChild;
    if (!(band instanceof HTMLElement)) return;
    const perSecond = band.clientWidth / WINDOW_S;
    reconcile(
      band,
      bars,
      (bar) => bar.key,
      (bar) => make("div", { class: `bar ${bar.kind}`, title: bar.title }),
      (element, bar) => {
        this.place(element, bar.start_s, bar.end_s);
        const hasRoom = (bar.end_s - bar.start_s) * perSecond >= LETTER_PX * bar.text.length + 4;
        setText(element, hasRoom ? bar.text : "");
      },
    );
  }

  /** @param {HTMLElement} element @param {number} start @param {number} end */
  place(element, start, end) {
    element.style.left = `${(100 * (start - this.origin)) / WINDOW_S}%`;
    element.style.width = `${(100 * Math.max(end - start, 0)) / WINDOW_S}%`;
  }

  /** Let time pass: all bars move together, and those of overdue plans grow. */
  move() {
    if (this.state === null || document.hidden) return;
    const now = this.now();
    this.nodes.style.setProperty("--shift", `${(-100 * (now - BEFORE_S - this.origin)) / WINDOW_S}%`);
    for (const worker of this.state.workers) {
      const plan = worker.plans[0];
      if (plan === undefined || plan.end_s > now) continue;
      const element = this.nodes.querySelector(`[data-key="plan-${plan.plan_id}-${CSS.escape(worker.worker_id)}"]`);
      if (element instanceof HTMLElement) {
        element.classList.add("overdue");
        this.place(element, plan.start_s, now);
      }
    }
  }

  /** Say in words what each worker does. */
  tell() {
    if (this.state === null || document.hidden) return;
    const now = this.now();
    const workers = new Map(this.state.workers.map((worker) => [worker.worker_id, worker]));
    for (const row of this.nodes.querySelectorAll(".worker")) {
      const worker = workers.get(/** @type {HTMLElement} */ (row).dataset["key"] ?? "");
      const text = row.lastElementChild;
      if (worker && text instanceof HTMLElement) setText(text, describeWorker(worker, now));
    }
  }
}

/** @param {Worker} worker */
function makeRow(worker) {
  const name = make("span", { class: "name" }, make("b", {}, worker.worker_id), make("span", { class: "quiet" }));
  const track = make(
    "div",
    { class: "track", "aria-hidden": "true" },
    make("div", { class: "band" }),
    make("div", { class: "mark" }),
  );
  return make("div", { class: "worker" }, name, track, make("span", { class: "now-text" }));
}

/** @param {Worker} worker @param {number} now */
export function describeWorker(worker, now) {
  const handoff = describeHandoff(worker);
  const plan = worker.plans[0];
  if (!worker.alive) return "lost";
  if (worker.aside_until_s !== null) return `set aside, ${formatSeconds(Math.max(0, worker.aside_until_s - now))} left`;
  if (plan === undefined) {
    const isKept = worker.reserved_until_s !== null && worker.reserved_until_s > now;
    const idle = worker.coreless ? "idle, no core free" : "idle";
    return `${isKept ? "reserved" : idle}${handoff}`;
  }
  const left = plan.end_s - now;
  const until = left > 0 ? `${formatSeconds(left)} left` : `${formatSeconds(-left)} overdue`;
  const behind = worker.plans.length > 1 ? `, ${worker.plans.length - 1} behind` : "";
  return `${plan.stages}${plan.degree > 1 ? ` ×${plan.degree}` : ""}, ${until}${behind}${handoff}`;
}

/** @param {Worker} worker */
function describeHandoff(worker) {
  if (worker.handoff === null || worker.handoff.capacity_bytes === 0) return "";
  const share = (100 * worker.handoff.used_bytes) / worker.handoff.capacity_bytes;
  return ` · buffer ${share > 0 && share < 1 ? "<1" : Math.round(share)} %`;
}

/**
 * The bars of each worker.
 * @param {ClusterState} state
 * @returns {Map<string, Bar[]>}
 */
export function listBars(state) {
  /** @type {Map<string, Bar[]>} */
  const bars = new Map(state.workers.map((worker) => [worker.worker_id, []]));
  for (const stage of state.ended) {
    const degree = stage.workers.length;
    const steps = stage.steps ? `, ${formatCount(stage.steps, "step")}` : "";
    for (const worker of stage.workers) {
      bars.get(worker)?.push({
        key: `ended-${stage.plan_id}-${stage.stage}-${stage.start_s}`,
        kind: stage.stage.toLowerCase(),
        text: degree > 1 ? `${stage.stage}×${degree}` : stage.stage,
        title: `${stage.stage} of ${stage.model}${steps}, ${formatSeconds(stage.end_s - stage.start_s)}: ${stage.request_ids.join(", ")}`,
        start_s: stage.start_s,
        end_s: stage.end_s,
      });
    }
  }
  for (const worker of state.workers) {
    for (const plan of worker.plans) {
      bars.get(worker.worker_id)?.push({
        key: `plan-${plan.plan_id}-${worker.worker_id}`,
        kind: `${plan.stages.includes("D") ? "d" : plan.stages[0]?.toLowerCase()} plan`,
        text: plan.degree > 1 ? `${plan.stages}×${plan.degree}` : plan.stages,
        title: `${plan.stages} of ${plan.model}, expected to take ${formatSeconds(plan.end_s - plan.start_s)}: ${plan.request_ids.join(", ")}`,
        start_s: plan.start_s,
        end_s: plan.end_s,
      });
    }
  }
  return bars;
}
