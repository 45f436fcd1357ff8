// The timeline of a request that has ended: what took which part of its time, and where it ran.

import { make } from "./dom.js";
import { formatCount, formatSeconds } from "./format.js";

/** @typedef {import("./types.js").Facts} Facts */
/** @typedef {import("./types.js").Span} Span */
/** @typedef {{kind: string, label: string, start_s: number, end_s: number}} Part */

const NAMES = { encode: "E encode", diffuse: "D diffuse", decode: "C decode" };
const KINDS = { encode: "e", diffuse: "d", decode: "c" };
// Shorter gaps between two stages are not told: stages of one plan follow each other at once.
const MIN_GAP_S = 0.0005;

/**
 * The parts of a request's time, in order and without gaps.
 * @param {Facts} facts
 * @returns {Part[]}
 */
export function listParts(facts) {
  const spans = [...(facts.timeline ?? [])].sort((a, b) => a.start_s - b.start_s);
  const first = spans[0];
  if (first === undefined) return [];
  const arrival = first.start_s - facts.queue_s;
  /** @type {Part[]} */
  const parts = [];
  let clock = arrival;
  let before = /** @type {Span | null} */ (null);
  for (const span of spans) {
    if (span.start_s - clock > MIN_GAP_S) {
      parts.push({ kind: "wait", label: nameGap(before, span), start_s: clock, end_s: span.start_s });
    }
    parts.push({ kind: KINDS[span.stage], label: nameSpan(span), start_s: span.start_s, end_s: span.end_s });
    clock = Math.max(clock, span.end_s);
    before = span;
  }
  const end = arrival + (facts.latency_s ?? 0);
  if (end - clock > MIN_GAP_S) {
    parts.push({ kind: "wait", label: "writing and sending the file", start_s: clock, end_s: end });
  }
  return parts;
}

/** @param {Span | null} before @param {Span} span */
function nameGap(before, span) {
  if (before === null) return "waited for workers";
  const [from, to] = [before.workers[0], span.workers[0]];
  return from === to ? `waited on ${to}` : `transfer ${from} → ${to}, and waiting`;
}

/** @param {Span} span */
function nameSpan(span) {
  const steps = span.steps ? `, ${formatCount(span.steps, "step")}` : "";
  return `${NAMES[span.stage]} on ${span.workers.join(", ")} (degree ${span.degree}${steps})`;
}

/**
 * @param {Facts} facts
 * @returns {HTMLElement}
 */
export function drawTimeline(facts) {
  const parts = listParts(facts);
  const first = parts[0];
  const list = make("ol", { class: "timeline", "aria-label": "Timeline" });
  if (first === undefined) return list;
  const begin = first.start_s;
  const total = Math.max(...parts.map((part) => part.end_s), begin + 1e-6) - begin;
  for (const part of parts) {
    const bar = make("i", { class: part.kind });
    bar.style.left = `${(100 * (part.start_s - begin)) / total}%`;
    bar.style.width = `${(100 * (part.end_s - part.start_s)) / total}%`;
    const line = make("span", { class: "line", "aria-hidden": "true" }, bar);
    if (facts.slo_s !== null && facts.slo_s < total) {
      const mark = make("i", { class: "deadline", title: "deadline" });
      mark.style.left = `${(100 * facts.slo_s) / total}%`;
      line.append(mark);
    }
    const seconds = make("span", { class: "seconds" }, formatSeconds(part.end_s - part.start_s));
    list.append(make("li", {}, make("span", {}, part.label), line, seconds));
  }
  return list;
}

/**
 * What is known of a request beside its timeline.
 * @param {Facts} facts
 * @returns {HTMLElement}
 */
export function drawFacts(facts) {
  const slo = facts.slo_s === null ? "" : ` of ${formatSeconds(facts.slo_s)}`;
  const rows = {
    Latency: facts.latency_s === null ? "unknown" : formatSeconds(facts.latency_s),
    Deadline: facts.slo_met ? `met${slo}` : `missed${slo}`,
    Seed: String(facts.seed),
    Size: `${facts.width}x${facts.height}`,
    Memory: `${Math.round(facts.peak_memory_mb)} MiB at most${facts.tiled ? ", decoded in tiles" : ""}`,
    Retries: facts.retries ? String(facts.retries) : "",
    Request: facts.request_id,
  };
  const list = make("dl");
  for (const [name, text] of Object.entries(rows)) {
    if (text) list.append(make("dt", {}, name), make("dd", {}, text));
  }
  return list;
}
