// The timeline of a request that has ended: what took which part of its time, and where it ran.

import { make } from "./dom.js";
import { formatCount, formatSeconds } from "./format.js";

/** @typedef {import("./types.js").Facts} Facts */
/** @typedef {import("./types.js").Span} Span */
/** @typedef {{kind: string, label: string, bars: [number, number][]}} Row its bars begin and end at these times */

const NAMES = { encode: "E encode", diffuse: "D diffuse", decode: "C decode" };
const KINDS = { encode: "e", diffuse: "d", decode: "c" };
/** Shorter gaps are told together. */
const MIN_GAP_S = 0.02;

/**
 * The parts of a request's time: a row for each stage on the same workers, and for each wait. All together are its
 * latency.
 * @param {Facts} facts
 * @returns {Row[]}
 */
export function listRows(facts) {
  const spans = [...(facts.timeline ?? [])].sort((a, b) => a.start_s - b.start_s);
  const first = spans[0];
  if (first === undefined) return [];
  const arrival = first.start_s - facts.queue_s;
  /** @type {Row[]} */
  const rows = [];
  /** @type {Row} */
  const gaps = { kind: "wait", label: "shorter waits, between plans", bars: [] };
  let clock = arrival;
  /** @type {Span[]} */
  let group = [];
  const endGroup = () => {
    const [span] = group;
    if (span === undefined) return;
    rows.push({ kind: KINDS[span.stage], label: nameGroup(group), bars: group.map((one) => [one.start_s, one.end_s]) });
    group = [];
  };
  for (const span of spans) {
    const before = group[group.length - 1];
    const continues = before !== undefined && isAlike(before, span);
    if (!continues) endGroup();
    if (span.start_s > clock) {
      if (continues || span.start_s - clock < MIN_GAP_S) gaps.bars.push([clock, span.start_s]);
      else rows.push({ kind: "wait", label: nameGap(before, span), bars: [[clock, span.start_s]] });
    }
    group.push(span);
    clock = Math.max(clock, span.end_s);
  }
  endGroup();
  const end = arrival + (facts.latency_s ?? 0);
  if (end > clock) rows.push({ kind: "wait", label: "writing and sending the file", bars: [[clock, end]] });
  if (gaps.bars.length > 0) rows.push(gaps);
  return rows;
}

/** @param {Span} a @param {Span} b */
function isAlike(a, b) {
  return a.stage === b.stage && a.workers.join() === b.workers.join();
}

/** @param {Span | undefined} before @param {Span} span */
function nameGap(before, span) {
  if (before === undefined) return "waited for workers";
  const [from, to] = [before.workers[0], span.workers[0]];
  return from === to ? `waited on ${to}` : `transfer ${from} → ${to} and wait`;
}

/** @param {Span[]} group */
function nameGroup(group) {
  const [span] = group;
  if (span === undefined) return "";
  const steps = group.reduce((sum, one) => sum + (one.steps ?? 0), 0);
  const plans = group.length > 1 ? ` in ${group.length} plans` : "";
  const degree = span.degree > 1 ? `, degree ${span.degree}` : "";
  return `${NAMES[span.stage]} on ${span.workers.join(", ")}${degree}${steps ? `, ${formatCount(steps, "step")}` : ""}${plans}`;
}

/**
 * @param {Facts} facts
 * @returns {HTMLElement}
 */
export function drawTimeline(facts) {
  const rows = listRows(facts);
  const list = make("ol", { class: "timeline", "aria-label": "Timeline" });
  const times = rows.flatMap((row) => row.bars.flat());
  const begin = Math.min(...times);
  const total = Math.max(...times, begin + 1e-6) - begin;
  for (const row of rows) {
    const line = make("span", { class: "line", "aria-hidden": "true" });
    let seconds = 0;
    for (const [start, end] of row.bars) {
      const bar = make("i", { class: row.kind });
      bar.style.left = `${(100 * (start - begin)) / total}%`;
      bar.style.width = `${(100 * (end - start)) / total}%`;
      line.append(bar);
      seconds += end - start;
    }
    if (facts.slo_s !== null && facts.slo_s < total) {
      const mark = make("i", { class: "deadline", title: "deadline" });
      mark.style.left = `${(100 * facts.slo_s) / total}%`;
      line.append(mark);
    }
    list.append(make("li", {}, make("span", {}, row.label), line, make("span", { class: "seconds" }, formatSeconds(seconds))));
  }
  return list;
}

/** The quality of a request that is not exact, and the steps that it did not have. @param {Facts} facts */
function describeQuality(facts) {
  /** @type {string[]} */
  const parts = [];
  if (facts.quality !== undefined && facts.quality !== "exact") parts.push(facts.quality);
  if (facts.skipped_steps) parts.push(`${formatCount(Math.round(facts.skipped_steps), "step")} skipped`);
  if (facts.reduced_steps) parts.push(`made with ${formatCount(facts.reduced_steps, "step")}`);
  return parts.join(", ");
}

/**
 * What is known of a request beside its timeline.
 * @param {Facts} facts
 * @returns {HTMLElement}
 */
export function drawFacts(facts) {
  const slo = facts.slo_s === null ? "" : `${formatSeconds(facts.slo_s)}, `;
  const rows = {
    Latency: facts.latency_s === null ? "unknown" : formatSeconds(facts.latency_s),
    Predicted: typeof facts.predicted_s === "number" ? formatSeconds(facts.predicted_s) : "",
    Deadline: `${slo}${facts.slo_met ? "met" : "missed"}`,
    Quality: describeQuality(facts),
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
