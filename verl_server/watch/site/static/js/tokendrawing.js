/**
 * What the token strips show: the drawing of tokens on a canvas, and the figures of one token.
 *
 * `tokens` calls it for the windows in sight.
 */

import { tokenColour } from "./colours.js";
import { foreign, h, isDark, styleValue } from "./dom.js";
import { figure, shorten, toNumber, whole } from "./format.js";
import { differenceOf, firstOfLine, tokenText, tokenValue } from "./tokenlayout.js";

/** Height of a line of tokens, in pixels. */
export const LINE = 21;
/** Width of the numbers of turns at the left. */
export const MARGIN = 56;

/**
 * Draw the lines of a window that are in sight.
 * @param {CanvasRenderingContext2D} context
 * @param {{window: any, layout: import("./tokenlayout.js").Layout}} block
 * @param {object} picture
 * @param {number} picture.top Of the window on the canvas.
 * @param {number} picture.height Of the canvas.
 * @param {string} picture.colour Name in `TOKEN_COLOURS`.
 * @param {Map<string, number>} picture.versions
 * @param {number} picture.pointed Position of the token under the pointer, -1 for none.
 * @param {number} picture.chosen Position of the chosen token, -1 for none.
 * @param {string} picture.font
 */
export function drawTokens(context, { window, layout }, { top, height, colour, versions, pointed, chosen, font }) {
  const dark = isDark();
  const [ink, muted, accent] = [styleValue("--ink"), styleValue("--muted"), styleValue("--accent")];
  const lineFrom = Math.max(0, Math.floor(-top / LINE));
  const lineTo = Math.min(layout.lines, Math.ceil((height - top) / LINE));
  for (
    let index = firstOfLine(layout, lineFrom);
    index < layout.line.length && layout.line[index] < lineTo;
    index += 1
  ) {
    const y = top + layout.line[index] * LINE;
    const x = MARGIN + layout.x[index];
    const position = window.start + index;
    if (index === 0 || window.turn[index] !== window.turn[index - 1]) {
      context.font = `10.5px ${styleValue("--sans")}`;
      context.fillStyle = muted;
      context.textAlign = "right";
      const label = window.turn[index] < 0 ? "" : `turn ${window.turn[index]}`;
      context.fillText(label, MARGIN - 7, y + LINE / 2);
      context.textAlign = "left";
    }
    const ground = tokenColour(colour, tokenValue(window, index, colour, versions), dark);
    if (ground) {
      context.fillStyle = ground;
      context.fillRect(x, y + 1.5, layout.widths[index], LINE - 3);
    }
    if (position === pointed || position === chosen) {
      context.strokeStyle = position === chosen ? accent : ink;
      context.lineWidth = position === chosen ? 2 : 1;
      context.strokeRect(x + 0.5, y + 2, layout.widths[index] - 1, LINE - 4);
    }
    context.font = window.special[index] ? `italic ${font}` : font;
    context.fillStyle = !ground && (window.special[index] || window.mask[index] === 0) ? muted : ink;
    context.fillText(tokenText(window, index), x + 2, y + LINE / 2 + 0.5, layout.widths[index]);
  }
}

/**
 * Return the figures of a token as elements.
 * @param {any} window
 * @param {number} index
 */
export function tokenFacts(window, index) {
  const each = (/** @type {string} */ name, /** @type {any} */ value) =>
    h("span", { class: "fact" }, h("small", {}, name), h("b", {}, value));
  const number = (/** @type {string} */ name, /** @type {any} */ value, digits = 4) =>
    toNumber(value) === null ? null : each(name, figure(value, digits));
  const who = ["read", "sampled, in the loss", "sampled, not in the loss"][window.mask[index]] ?? "";
  const difference = differenceOf(window, index);
  const version =
    window.version[index] < 0 ? null : each("version", foreign(shorten(window.versions[window.version[index]], 24)));
  return [
    h("span", { class: "token-quote" }, foreign(window.text ? JSON.stringify(window.text[index]) : "no text")),
    each("position", whole(window.start + index)),
    each("id", String(window.id[index])),
    h("span", { class: "fact" }, h("b", {}, who)),
    number("server", window.logprob[index]),
    window.policy ? number("policy", window.policy[index]) : null,
    number("trainer", window.trainer?.[index] ?? null),
    difference === null ? null : each("difference", figure(difference, 3)),
    number("entropy", window.entropy?.[index] ?? null),
    number("weight", window.weight?.[index] ?? null),
    version,
    window.turn[index] < 0 ? null : each("turn", String(window.turn[index])),
  ].filter((part) => part !== null);
}
