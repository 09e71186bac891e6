/**
 * A window of time on an axis: places of moments, marks, zooming and panning. All functions are pure.
 *
 * `lanes` draws with it, `waits` changes the window. Moments are seconds since 1970, windows are [begin, end].
 */

/** @typedef {[number, number]} Window */

const STEPS = [
  1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200,
  14400, 28800, 86400, 172800, 604800,
];
const SHORTEST = 0.005;

/**
 * Return moments for the marks of an axis, about `count` of them, at round distances from `origin`.
 * @param {Window} window
 * @param {number} origin
 * @param {number} count
 */
export function timeMarks([begin, end], origin, count) {
  if (!(end > begin)) return [];
  const raw = (end - begin) / Math.max(1, count);
  const step = STEPS.find((each) => each >= raw) ?? STEPS[STEPS.length - 1] * Math.ceil(raw / STEPS[STEPS.length - 1]);
  const marks = [];
  for (let at = Math.ceil((begin - origin) / step - 1e-9); origin + at * step <= end; at += 1)
    marks.push(origin + at * step);
  return marks;
}

/**
 * Return the text of a mark: the time since the beginning of the run.
 * @param {number} seconds
 * @param {number} span Seconds of the whole window, which tell how exact the text must be.
 */
export function markText(seconds, span) {
  const sign = seconds < -1e-9 ? "\u2212" : "";
  const size = Math.abs(seconds);
  if (span < 8) return `${sign}${size.toFixed(span < 0.08 ? 3 : span < 0.8 ? 2 : 1)} s`;
  if (span > 172800) return `${sign}${Math.round((10 * size) / 86400) / 10} d`;
  const whole = Math.round(size);
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (/** @type {number} */ value) => String(value).padStart(2, "0");
  return hours ? `${sign}${hours}:${two(minutes)}:${two(rest)}` : `${sign}${minutes}:${two(rest)}`;
}

/**
 * Return a window that is `factor` times as long, with `center` in its place, inside of the limits.
 * @param {Window} window
 * @param {number} factor
 * @param {number} center
 * @param {Window} limits
 * @returns {Window}
 */
export function zoomed([begin, end], factor, center, limits) {
  const span = Math.max(SHORTEST, (end - begin) * factor);
  const share = end > begin ? (center - begin) / (end - begin) : 0.5;
  return inside([center - share * span, center + (1 - share) * span], limits);
}

/**
 * Return the window moved by `seconds`, inside of the limits.
 * @param {Window} window
 * @param {number} seconds
 * @param {Window} limits
 * @returns {Window}
 */
export function panned([begin, end], seconds, limits) {
  return inside([begin + seconds, end + seconds], limits);
}

/** @param {Window} window @param {Window} limits @returns {Window} */
function inside([begin, end], [first, last]) {
  const span = Math.min(end - begin, last - first);
  const from = Math.min(Math.max(begin, first), last - span);
  return [from, from + span];
}
