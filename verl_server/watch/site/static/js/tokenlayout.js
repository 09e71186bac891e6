/**
 * Where tokens lie on the lines of the token strips, what is written for them, and which value gives their colour.
 *
 * `tokens` draws with it. All functions are pure. A window is an answer `Tokens` in answers/episode.py.
 */

import { toNumber } from "./format.js";

/** @typedef {{line: Int32Array, x: Float32Array, widths: Float32Array, lines: number}} Layout */

const SHOWN = 60;
/** Space between tokens, and inside of a token at its ends, in pixels. */
const BETWEEN = 1;
const INSIDE = 2;

/**
 * Return what is written for a token: its text with visible line ends, or its id without a tokenizer.
 * @param {any} window
 * @param {number} index
 */
export function tokenText(window, index) {
  if (!window.text) return String(window.id[index]);
  const text = window.text[index];
  if (text === "") return "\u2205";
  const visible = text.replace(/\r\n|\n|\r/g, "\u21b5").replace(/\t/g, "\u21e5");
  return visible.length > SHOWN ? `${visible.slice(0, SHOWN - 1)}\u2026` : visible;
}

/** Return true if the token ends its line of text. @param {any} window @param {number} index */
function endsLine(window, index) {
  return Boolean(window.text) && /[\n\r]$/.test(window.text[index]);
}

/**
 * Lay the tokens of a window on lines, as text: a token that ends a line of text, and a turn that begins, break the
 * line.
 * @param {any} window
 * @param {number} width Of a line, in pixels.
 * @param {(text: string) => number} measure Text -> its width in pixels.
 * @returns {Layout}
 */
export function layoutTokens(window, width, measure) {
  const count = window.id.length;
  const line = new Int32Array(count);
  const x = new Float32Array(count);
  const widths = new Float32Array(count);
  let at = 0;
  let number = 0;
  for (let index = 0; index < count; index += 1) {
    const own = Math.min(width, measure(tokenText(window, index)) + 2 * INSIDE);
    const isNewTurn = index > 0 && window.turn[index] !== window.turn[index - 1];
    if (at > 0 && (at + own > width || isNewTurn)) {
      number += 1;
      at = 0;
    }
    line[index] = number;
    x[index] = at;
    widths[index] = own;
    at += own + BETWEEN;
    if (endsLine(window, index) && index < count - 1) {
      number += 1;
      at = 0;
    }
  }
  return { line, x, widths, lines: count ? number + 1 : 0 };
}

/**
 * Return the index of the token at a place of a layout, -1 if there is none.
 * @param {Layout} layout
 * @param {number} x
 * @param {number} line
 */
export function tokenAt(layout, x, line) {
  const first = firstOfLine(layout, line);
  for (let index = first; index < layout.line.length && layout.line[index] === line; index += 1) {
    if (x >= layout.x[index] && x < layout.x[index] + layout.widths[index] + BETWEEN) return index;
  }
  return -1;
}

/**
 * Return the index of the first token on a line, or of the first one behind it.
 * @param {Layout} layout
 * @param {number} line
 */
export function firstOfLine(layout, line) {
  let low = 0;
  let high = layout.line.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (layout.line[middle] < line) low = middle + 1;
    else high = middle;
  }
  return low;
}

/**
 * Return the number behind the colour of a token, null if it has none.
 * @param {any} window
 * @param {number} index
 * @param {string} colour Name in `TOKEN_COLOURS`.
 * @param {Map<string, number>} versions Version -> its number among all versions.
 * @returns {number | null}
 */
export function tokenValue(window, index, colour, versions) {
  if (colour === "mask") return window.mask[index];
  if (colour === "logprob") return toNumber(window.logprob[index]);
  if (colour === "entropy") return toNumber(window.entropy?.[index] ?? null);
  if (colour === "difference") return differenceOf(window, index);
  const own = window.version[index];
  return own < 0 ? null : (versions.get(window.versions[own]) ?? own);
}

/**
 * Return the trainer's log-probability of a token minus that of the policy on the server, null if one is unknown.
 * @param {any} window
 * @param {number} index
 */
export function differenceOf(window, index) {
  const trainer = toNumber(window.trainer?.[index] ?? null);
  const server = toNumber((window.policy ?? window.logprob)[index]);
  return trainer === null || server === null ? null : trainer - server;
}
