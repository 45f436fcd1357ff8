// Figures as text.

/** @param {number} seconds */
export function formatSeconds(seconds) {
  if (Math.abs(seconds) < 0.0995) return `${Math.round(seconds * 1000)} ms`;
  if (Math.abs(seconds) < 9.95) return `${seconds.toFixed(1)} s`;
  if (Math.abs(seconds) < 100) return `${Math.round(seconds)} s`;
  const whole = Math.round(Math.abs(seconds));
  const sign = seconds < 0 ? "-" : "";
  if (whole < 3600) return `${sign}${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${sign}${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

/** @param {number} count @param {string} one @param {string} [many] */
export function formatCount(count, one, many = `${one}s`) {
  return `${count} ${count === 1 ? one : many}`;
}

/** The time of the day. @param {number} unixSeconds */
export function formatClock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString(undefined, { hour12: false });
}

/** @param {number} part @param {number} whole */
export function formatShare(part, whole) {
  return `${((100 * part) / whole).toFixed(part === whole ? 0 : 1)} %`;
}

/** A long id, cut in its middle. @param {string} id */
export function shorten(id) {
  return id.length <= 18 ? id : `${id.slice(0, 9)}…${id.slice(-6)}`;
}
