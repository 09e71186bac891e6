/**
 * What a chart draws over its lines: bounds of advisories, and marks of values that are not finite.
 *
 * `charts` calls `drawOver` after each drawing of a plot.
 */

import { styleValue } from "./dom.js";
import { nearest } from "./series.js";

/**
 * @param {any} plot
 * @param {{x: number[], lines: {marks: number[]}[], bounds: number[]}} chart
 */
export function drawOver(plot, { x, lines, bounds }) {
  drawBounds(plot, bounds);
  drawMarks(
    plot,
    x,
    lines.flatMap(({ marks }) => marks),
  );
}

/**
 * Draw bounds as dashed lines. One outside the range of the axis is not drawn.
 * @param {any} plot
 * @param {number[]} bounds
 */
function drawBounds(plot, bounds) {
  const { ctx: context, bbox } = plot;
  context.save();
  context.strokeStyle = styleValue("--bad");
  context.lineWidth = 1.6 * devicePixelRatio;
  context.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
  for (const bound of bounds) {
    if (!(bound >= plot.scales.y.min && bound <= plot.scales.y.max)) continue;
    const y = Math.round(plot.valToPos(bound, "y", true));
    context.beginPath();
    context.moveTo(bbox.left, y);
    context.lineTo(bbox.left + bbox.width, y);
    context.stroke();
  }
  context.restore();
}

/**
 * Mark values that are not finite: a diverged run must be seen.
 * @param {any} plot
 * @param {number[]} x
 * @param {number[]} marks Indices of such values.
 */
function drawMarks(plot, x, marks) {
  const context = plot.ctx;
  const top = plot.bbox.top + 7 * devicePixelRatio;
  context.save();
  context.strokeStyle = styleValue("--bad");
  context.lineWidth = 1.6 * devicePixelRatio;
  const arm = 3 * devicePixelRatio;
  const [low, high] = [nearest(x, plot.scales.x.min), nearest(x, plot.scales.x.max)];
  for (const index of marks) {
    if (index < low || index > high) continue;
    const left = plot.valToPos(x[index], "x", true);
    context.beginPath();
    for (const side of [-1, 1]) {
      context.moveTo(left - arm, top - side * arm);
      context.lineTo(left + arm, top + side * arm);
    }
    context.stroke();
  }
  context.restore();
}
