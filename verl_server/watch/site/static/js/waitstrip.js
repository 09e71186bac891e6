/**
 * `waitStrip`: the waits of one episode as a strip over its time. `episode` shows it in its head.
 */

import { kindColour } from "./colours.js";
import { canvasContext, h, isDark } from "./dom.js";
import { duration } from "./format.js";
import { KIND_NAMES } from "./lanes.js";

/** @param {[string, number, number][]} waits Kind, begin, end, in seconds since the episode began. */
export function waitStrip(waits) {
  const canvas = h("canvas", {
    class: "wait-strip",
    role: "img",
    "aria-label": "What the episode waited for, over its time",
  });
  const box = h("div", { class: "wait-box" }, canvas);
  const begin = Math.min(...waits.map(([, from]) => from));
  const end = Math.max(...waits.map(([, , to]) => to));
  const draw = () => {
    const width = box.clientWidth;
    if (!width) return;
    const context = canvasContext(canvas, width, 10);
    const dark = isDark();
    context.fillStyle = kindColour("idle", dark);
    context.fillRect(0, 0, width, 10);
    for (const [kind, from, to] of waits) {
      context.fillStyle = kindColour(kind, dark);
      context.fillRect(
        ((from - begin) / (end - begin || 1)) * width,
        0,
        Math.max(0.7, ((to - from) / (end - begin || 1)) * width),
        10,
      );
    }
  };
  const sizes = new ResizeObserver(draw);
  sizes.observe(box);
  canvas.addEventListener("mousemove", (/** @type {MouseEvent} */ event) => {
    const time = begin + (event.offsetX / box.clientWidth) * (end - begin);
    const found = waits.find(([, from, to]) => time >= from && time < to);
    const at = `${duration(time - begin)} after the begin`;
    canvas.title = found ? `${KIND_NAMES[found[0]] ?? found[0]} for ${duration(found[2] - found[1])}, ${at}` : at;
  });
  return box;
}
