/**
 * What a chart marks: single points, and over its lines bounds of advisories and values that are not finite. A diverged
 * run must be seen.
 *
 * `charts` takes the series of points from `pointSeries`, and calls `drawOver` after each drawing of a plot.
 */

import { styleValue } from "./dom.js";
import { nearest } from "./series.js";

export const NOT_FINITE = "not finite";

/**
 * Return the series of a line of few values: points that a line joins, hollow points, or rings around points.
 * @param {"points" | "hollow" | "ring"} style
 * @param {string} colour
 */
export function pointSeries(style, colour) {
  const points = {
    points: { size: 7, width: 1, fill: colour },
    hollow: { size: 7, width: 1.6, fill: styleValue("--panel") },
    ring: { size: 14, width: 1.6, fill: "transparent" },
  }[style];
  const paths = style === "points" ? undefined : () => null;
  return { stroke: colour, width: 1.6, spanGaps: true, paths, points: { show: true, stroke: colour, ...points } };
}

/**
 * Return true if the head of a chart tells the value of a line. It leaves out points without a value under the cursor;
 * without a cursor, hollow points and rings.
 * @param {import("./charts.js").Line} line
 * @param {number | null} index Place of the cursor.
 */
export function isTold({ style, values }, index) {
  if (!style) return true;
  return index === null ? style === "points" : values[index] !== null;
}

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
 * Mark steps on the axis. Marks side by side share one text.
 * @param {any} plot
 * @param {number[]} steps The x values of the chart.
 * @param {number[]} marks Indices in `steps`.
 */
function drawMarks(plot, steps, marks) {
  const [low, high] = [nearest(steps, plot.scales.x.min), nearest(steps, plot.scales.x.max)];
  const shown = [...new Set(marks)].filter((index) => index >= low && index <= high).sort((a, b) => a - b);
  if (!shown.length) return;
  const context = plot.ctx;
  const right = plot.bbox.left + plot.bbox.width;
  const axis = plot.bbox.top + plot.bbox.height;
  const arm = 3.5 * devicePixelRatio;
  context.save();
  context.strokeStyle = context.fillStyle = styleValue("--bad");
  context.lineWidth = 1.8 * devicePixelRatio;
  context.font = `${11 * devicePixelRatio}px ${styleValue("--sans")}`;
  context.textBaseline = "bottom";
  const room = context.measureText(NOT_FINITE).width + 3 * arm;
  let told = -Infinity;
  for (const index of shown) {
    const x = plot.valToPos(steps[index], "x", true);
    context.beginPath();
    for (const side of [-1, 1]) {
      context.moveTo(x - arm, axis - side * arm);
      context.lineTo(x + arm, axis + side * arm);
    }
    context.stroke();
    if (x - told < room) continue; // the text of the mark before it lies there
    told = x;
    const isAtEnd = x + room > right;
    context.textAlign = isAtEnd ? "right" : "left";
    context.fillText(NOT_FINITE, x + (isAtEnd ? -arm : arm), axis - arm);
  }
  context.restore();
}
