/**
 * Texts for figures: what a number, a share, a time or a long name looks like on the page.
 *
 * Every view uses these functions, so that a figure looks alike everywhere. All functions are pure.
 */

const THIN_SPACE = "\u2009";
const NOTHING = "\u2013";

/**
 * Return the number that an answer holds. NaN and the infinities travel as strings, because JSON has none.
 * @param {unknown} value
 * @returns {number | null} null if there is no number
 */
export function toNumber(value) {
  if (typeof value === "number") return value;
  if (value === "NaN") return NaN;
  if (value === "Infinity") return Infinity;
  if (value === "-Infinity") return -Infinity;
  if (typeof value === "boolean") return value ? 1 : 0;
  return null;
}

/**
 * Return a number with about `digits` significant digits.
 * @param {unknown} value
 * @param {number} [digits]
 */
export function figure(value, digits = 3) {
  const number = toNumber(value);
  if (number === null) return NOTHING;
  if (Number.isNaN(number)) return "NaN";
  if (!Number.isFinite(number)) return number > 0 ? "\u221e" : "\u2212\u221e";
  const size = Math.abs(number);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e7)
    return withMinus(number.toExponential(Math.max(0, digits - 2)).replace(/(?:\.0+)?e\+?/, "e"));
  if (Number.isInteger(number) || size >= 10 ** digits) return whole(number);
  return withMinus(String(Number(number.toPrecision(digits))));
}

/**
 * Return a number with a fixed count of decimals, for columns.
 * @param {unknown} value
 * @param {number} [decimals]
 */
export function fixed(value, decimals = 2) {
  const number = toNumber(value);
  if (number === null || !Number.isFinite(number)) return figure(number);
  return withMinus(number.toFixed(decimals));
}

/**
 * Return a whole number with thin spaces between the thousands.
 * @param {unknown} value
 */
export function whole(value) {
  const number = toNumber(value);
  if (number === null || !Number.isFinite(number)) return figure(number);
  return withMinus(String(Math.round(number)).replace(/\B(?=(\d{3})+$)/g, THIN_SPACE));
}

/** @param {unknown} value */
export function percent(value) {
  const number = toNumber(value);
  if (number === null || !Number.isFinite(number)) return figure(number);
  const hundred = 100 * number;
  const decimals = hundred !== 0 && Math.abs(hundred) < 9.95 ? 1 : 0;
  return `${withMinus(hundred.toFixed(decimals))}${THIN_SPACE}%`;
}

/**
 * Return a duration, with the unit that suits it.
 * @param {unknown} value Seconds.
 */
export function duration(value) {
  const seconds = toNumber(value);
  if (seconds === null || !Number.isFinite(seconds)) return figure(seconds);
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 0.9995) return `${figure(1000 * seconds, size < 0.00995 ? 2 : 3)} ms`;
  if (size < 60) return `${figure(seconds)} s`;
  const minutes = Math.floor(size / 60);
  if (size < 3600) return `${seconds < 0 ? "\u2212" : ""}${minutes} min ${Math.floor(size % 60)} s`;
  if (size < 172800) return `${seconds < 0 ? "\u2212" : ""}${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${fixed(seconds / 86400, 1)} days`;
}

/** @param {unknown} value Bytes. */
export function bytes(value) {
  const number = toNumber(value);
  if (number === null || !Number.isFinite(number)) return figure(number);
  const units = ["B", "kB", "MB", "GB", "TB"];
  let size = number;
  let unit = 0;
  while (size >= 1000 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${unit === 0 ? whole(size) : figure(size)} ${units[unit]}`;
}

/**
 * Return a count and its noun.
 * @param {unknown} value
 * @param {string} one
 * @param {string} [many]
 */
export function counted(value, one, many = `${one}s`) {
  return `${whole(value)} ${toNumber(value) === 1 ? one : many}`;
}

/**
 * Return the local date and time.
 * @param {unknown} value Seconds since 1970.
 */
export function moment(value) {
  const seconds = toNumber(value);
  if (seconds === null || !Number.isFinite(seconds)) return NOTHING;
  const date = new Date(1000 * seconds);
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${clock(seconds)}`;
}

/**
 * Return the local time of day.
 * @param {unknown} value Seconds since 1970.
 */
export function clock(value) {
  const seconds = toNumber(value);
  if (seconds === null || !Number.isFinite(seconds)) return NOTHING;
  const date = new Date(1000 * seconds);
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/**
 * Return how long ago a moment was.
 * @param {unknown} then Seconds since 1970.
 * @param {number} now Seconds since 1970.
 */
export function ago(then, now) {
  const seconds = toNumber(then);
  if (seconds === null || !Number.isFinite(seconds)) return NOTHING;
  const past = now - seconds;
  if (past < 5) return "just now";
  if (past < 60) return `${Math.floor(past)} s ago`;
  if (past < 3600) return `${Math.floor(past / 60)} min ago`;
  if (past < 172800) return `${Math.floor(past / 3600)} h ago`;
  return `${Math.floor(past / 86400)} days ago`;
}

/**
 * Return a text of at most `length` characters: the end of a longer one gives way to an ellipsis.
 * @param {string} text
 * @param {number} length
 */
export function shorten(text, length) {
  const characters = text.length > length ? Array.from(text.slice(0, 2 * length + 2)) : [];
  return characters.length > length ? `${characters.slice(0, length - 1).join("")}\u2026` : text;
}

/**
 * Return a text on one line: runs of white space become one space.
 * @param {string} text
 * @param {number} length
 */
export function oneLine(text, length) {
  return shorten(
    text
      .slice(0, 4 * length)
      .replace(/\s+/g, " ")
      .trim(),
    length,
  );
}

/**
 * Return the words of a name in the style of code: "max_turns" becomes "max turns".
 * @param {string} name
 */
export function words(name) {
  return name.replace(/[_.]+/g, " ").trim();
}

/**
 * Return the place of the episodes of an evaluation among the steps of a run.
 * @param {number} step
 */
export function evaluationPlace(step) {
  return `held-out-${step}`;
}

/**
 * Return the step of an evaluation's place, null for another place.
 * @param {unknown} place A step, or the name of another place.
 */
export function evaluatedStep(place) {
  const match = /^held-out-(\d+)$/.exec(String(place));
  return match ? Number(match[1]) : null;
}

/**
 * Return the name of a step or of another place of a run, in words.
 * @param {string | number} place
 */
export function placeName(place) {
  const evaluated = evaluatedStep(place);
  if (evaluated !== null) return `held-out at step ${evaluated}`;
  return /^\d+$/.test(String(place)) ? `step ${place}` : place === "-" ? "episodes" : words(String(place));
}

/**
 * Return the text with a large first letter.
 * @param {string} text
 */
export function capital(text) {
  return text.slice(0, 1).toUpperCase() + text.slice(1);
}

/** @param {number} number */
function two(number) {
  return String(number).padStart(2, "0");
}

/** @param {string} text */
function withMinus(text) {
  return text.startsWith("-") ? `\u2212${text.slice(1)}` : text;
}
