// The routes of the service. They lie beside the folder of these files, whatever prefix the service has.

/** @typedef {import("./types.js").Images} Images */

const ROOT = new URL("../", import.meta.url);

/** An error of the service, in its own words. */
export class ServiceError extends Error {
  /** @param {string} message @param {string} code @param {number | null} predictedS */
  constructor(message, code, predictedS = null) {
    super(message);
    this.code = code;
    /** Seconds until a request that was refused would have ended. */
    this.predictedS = predictedS;
  }
}

/** @param {string} path @returns {string} */
export function locate(path) {
  return new URL(path, ROOT).href;
}

/**
 * @param {string} path
 * @param {RequestInit} [options]
 * @returns {Promise<Response>} an answer that is no error
 */
async function call(path, options = {}) {
  let answer;
  try {
    answer = await fetch(locate(path), { headers: { Accept: "application/json" }, ...options });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new ServiceError("The service cannot be reached. Is it running?", "unreachable");
  }
  if (answer.ok) return answer;
  let problem = null;
  try {
    problem = (await answer.json()).error;
  } catch {
    // not from the service itself: a proxy answers in its own form
  }
  const message = problem?.message ?? `The service answered with status ${answer.status} and no reason.`;
  throw new ServiceError(message, problem?.code ?? "http_error", problem?.predicted_s ?? null);
}

/** @param {string} path @returns {Promise<any>} */
export async function getJson(path) {
  return (await call(path)).json();
}

/** @param {string} path @returns {Promise<any>} */
export async function remove(path) {
  return (await call(path, { method: "DELETE" })).json();
}

/**
 * @param {string} path
 * @param {Record<string, unknown>} fields
 * @param {Images | null} images
 * @param {AbortSignal} [signal]
 * @returns {Promise<Response>}
 */
export function post(path, fields, images = null, signal = undefined) {
  if (images === null) {
    const headers = { "Content-Type": "application/json" };
    return call(path, { method: "POST", headers, body: JSON.stringify(fields), signal: signal ?? null });
  }
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) form.append(name, String(value));
  for (const file of images.files) form.append(images.name, file);
  if (images.mask !== null) form.append("mask", images.mask);
  return call(path, { method: "POST", body: form, signal: signal ?? null });
}

/**
 * The events of an answer that is a stream of server-sent events.
 * @param {Response} answer
 * @returns {AsyncGenerator<any, void>} the data of each
 */
export async function* readEvents(answer) {
  if (answer.body === null) return;
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const blocks = rest.split("\n\n");
    rest = blocks.pop() ?? "";
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data: "));
      if (data.length > 0) yield JSON.parse(data.map((line) => line.slice(6)).join("\n"));
    }
  }
}

/** The words of an error of any kind. @param {unknown} error */
export function describeError(error) {
  if (error instanceof ServiceError) return error.message;
  return error instanceof Error ? `The console has a defect: ${error.message}` : String(error);
}
