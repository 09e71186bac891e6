/**
 * The lanes of the view Who waits: their places, their drawing on a canvas, and what lies under the pointer.
 *
 * `waits` owns the canvas and the window of time. `layoutLanes` and `laneAt` are pure.
 */

import { faded, inkOn, kindColour } from "./colours.js";
import { duration, figure, percent, placeName, shorten, words } from "./format.js";
import { stack } from "./series.js";
import { markText, timeMarks } from "./timeaxis.js";

/** Width of the names at the left of the lanes. */
export const GUTTER = 124;
const AXIS = 24;
const WIDE = 22;
const NARROW = 13;
const GAP = 5;
const AREA = 108;
const RIGHT = 10;
const COUNT_KINDS = ["generate", "env", "queue", "other"];
/** @type {Record<string, string>} Kind -> its name on the page. */
export const KIND_NAMES = {
  generate: "generating",
  env: "waiting for the environment",
  queue: "waiting in the queue",
  other: "the agent's own time",
  evaluation: "evaluation",
  held: "push held by an evaluation",
  up: "up",
  lost: "lost",
};

/**
 * @typedef {object} Span
 * @property {string} kind
 * @property {number} begin
 * @property {number} end
 * @property {string} text
 * @property {number} [step] Step that a click opens.
 * @property {number} [evaluation] Step of the evaluation whose episodes a click opens.
 * @property {string} [more] A further line of text.
 */
/**
 * @typedef {object} Lane
 * @property {"trainer" | "push" | "evaluation" | "server" | "counts" | "episode"} kind
 * @property {string} name
 * @property {number} top
 * @property {number} height
 * @property {Span[]} spans
 * @property {any} [episode]
 */

/**
 * Return the lanes of an answer, one below the other, and their height.
 * @param {any} lanes `Lanes` in answers/lanes.py.
 * @returns {{lanes: Lane[], height: number}}
 */
export function layoutLanes(lanes) {
  /** @type {Lane[]} */
  const placed = [];
  let top = AXIS + GAP;
  const add = (/** @type {Omit<Lane, "top">} */ lane, /** @type {number} */ gap = GAP) => {
    placed.push({ ...lane, top });
    top += lane.height + gap;
  };
  if (lanes.trainer.length) {
    const spans = lanes.trainer.map((/** @type {any[]} */ span) => trainerSpan(span, lanes.evaluations));
    add({ kind: "trainer", name: "trainer", height: WIDE, spans });
  }
  if (lanes.pushes.length) {
    const spans = lanes.pushes.map((/** @type {any[]} */ [version, begin, end, error]) => ({
      kind: error ? "failed" : "push",
      begin,
      end,
      text: error ? `push of ${version}: ${error}` : `push of ${version}`,
    }));
    add({ kind: "push", name: "pushes", height: NARROW, spans });
  }
  if (lanes.evaluations.length)
    add({ kind: "evaluation", name: "evaluations", height: NARROW, spans: lanes.evaluations.map(evaluationSpan) });
  for (const server of lanes.servers) {
    const spans = server.spans.map((/** @type {any[]} */ [kind, begin, end]) => ({
      kind,
      begin,
      end,
      text: `${server.url}: ${KIND_NAMES[kind] ?? words(kind)}`,
    }));
    add({ kind: "server", name: server.url.replace(/^https?:\/\//, ""), height: NARROW, spans });
  }
  if (lanes.counts.time.length) add({ kind: "counts", name: "episodes", height: AREA, spans: [] }, 2 * GAP);
  for (const episode of lanes.episodes) {
    const spans = episode.parts.map((/** @type {any[]} */ [kind, begin, end]) => ({
      kind,
      begin,
      end,
      text: KIND_NAMES[kind] ?? words(kind),
    }));
    add({ kind: "episode", name: episode.label, height: NARROW - 3, spans, episode }, 2);
  }
  return { lanes: placed, height: top + GAP };
}

/**
 * @param {any[]} span Of `Lanes.trainer`.
 * @param {any[]} evaluations `EvaluationSpan` in answers/lanes.py.
 * @returns {Span}
 */
function trainerSpan([kind, begin, end, step], evaluations) {
  const found = evaluations.find((each) => each.begin < end && each.end > begin);
  if (kind === "evaluation" && found) return { ...evaluationSpan(found), begin, end };
  const text = `step ${step}: ${words(kind)}`;
  if (kind !== "held") return { kind, begin, end, step, text };
  return { kind, begin, end, step, text, more: heldText(duration(end - begin), found?.step) };
}

/** @param {any} evaluation `EvaluationSpan` in answers/lanes.py. @returns {Span} */
function evaluationSpan({ step, begin, end, reward, push_delay: delay, incomplete }) {
  const state = incomplete !== null ? `incomplete: ${incomplete}` : reward === null ? "plays" : `reward ${figure(reward)}`;
  const more = delay ? heldText(duration(delay), step) : "";
  return { kind: "evaluation", begin, end, evaluation: step, text: `evaluation at step ${step}: ${state}`, more };
}

/** @param {string} time @param {number | undefined} step */
function heldText(time, step) {
  return `push held ${time} by ${step === undefined ? "an evaluation" : `the evaluation at step ${step}`}`;
}

/**
 * Return the x of a moment on a canvas of a width.
 * @param {number} time
 * @param {import("./timeaxis.js").Window} window
 * @param {number} width
 */
export function timeToX(time, [begin, end], width) {
  return GUTTER + ((time - begin) / (end - begin || 1)) * (width - GUTTER - RIGHT);
}

/**
 * Return the moment at an x.
 * @param {number} x
 * @param {import("./timeaxis.js").Window} window
 * @param {number} width
 */
export function xToTime(x, [begin, end], width) {
  return begin + ((x - GUTTER) / (width - GUTTER - RIGHT)) * (end - begin);
}

/**
 * Return the lane and the span at a point, null if there is no lane. A span that is too narrow to hit is found within
 * `slack` seconds.
 * @param {Lane[]} lanes
 * @param {number} time
 * @param {number} y
 * @param {number} slack
 * @returns {{lane: Lane, span: Lane["spans"][0] | null} | null}
 */
export function laneAt(lanes, time, y, slack) {
  const lane = lanes.find((each) => y >= each.top - 1 && y <= each.top + each.height + 1);
  if (!lane) return null;
  const exact = lane.spans.find((span) => time >= span.begin && time < span.end);
  const close = exact ?? lane.spans.find((span) => time >= span.begin - slack && time < span.end + slack) ?? null;
  return { lane, span: close };
}

/**
 * Return the counts at a moment as a text, "" if the answer has none for it.
 * @param {any} counts `Counts` in answers/lanes.py.
 * @param {number} time
 */
export function countsText(counts, time) {
  const index = Math.floor((time - counts.time[0]) / (counts.interval || 1));
  if (!(index >= 0 && index < counts.time.length)) return "";
  return COUNT_KINDS.filter((kind) => counts[kind]?.[index])
    .map((kind) => `${Math.round(10 * counts[kind][index]) / 10} ${KIND_NAMES[kind]}`)
    .join(", ");
}

/**
 * Draw the lanes.
 * @param {CanvasRenderingContext2D} context Cleared, in CSS pixels.
 * @param {object} picture
 * @param {any} picture.answer `Lanes` in answers/lanes.py.
 * @param {Lane[]} picture.lanes
 * @param {import("./timeaxis.js").Window} picture.window
 * @param {number} picture.width
 * @param {number} picture.height
 * @param {Lane | null} picture.marked The lane under the pointer, or the selected one.
 * @param {boolean} picture.dark
 * @param {(name: string) => string} picture.style Custom property -> its value.
 */
export function drawLanes(context, { answer, lanes, window, width, height, marked, dark, style }) {
  const x = (/** @type {number} */ time) => timeToX(time, window, width);
  drawAxis(context, answer, window, width, height, style);
  context.save();
  context.beginPath();
  context.rect(GUTTER, 0, width - GUTTER - RIGHT + 1, height);
  context.clip();
  for (const lane of lanes) {
    if (lane === marked) {
      context.fillStyle = style("--hover");
      context.fillRect(GUTTER, lane.top - 2, width - GUTTER, lane.height + 4);
    }
    if (lane.kind === "counts") drawCounts(context, answer.counts, lane, x, dark, style);
    else drawSpans(context, lane, x, dark);
  }
  context.restore();
  context.font = `11.5px ${style("--sans")}`;
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (const lane of lanes) {
    context.fillStyle = style(lane === marked ? "--ink" : "--muted");
    context.fillText(
      shorten(lane.name, 20),
      GUTTER - 9,
      lane.top + (lane.kind === "counts" ? 7 : lane.height / 2 + 0.5),
    );
    if (lane.kind === "counts")
      context.fillText(`${Math.round(countLayers(answer.counts).most)} at most`, GUTTER - 9, lane.top + 23);
  }
}

/** @param {CanvasRenderingContext2D} context @param {any} answer @param {[number, number]} window @param {number} width @param {number} height @param {(name: string) => string} style */
function drawAxis(context, answer, window, width, height, style) {
  const origin = answer.first ?? window[0];
  context.font = `11px ${style("--sans")}`;
  context.textBaseline = "middle";
  context.textAlign = "center";
  const marks = timeMarks(window, origin, Math.max(2, Math.floor((width - GUTTER) / 110)));
  for (const mark of marks) {
    const x = Math.round(timeToX(mark, window, width)) + 0.5;
    context.strokeStyle = style("--grid");
    context.beginPath();
    context.moveTo(x, AXIS - 4);
    context.lineTo(x, height);
    context.stroke();
    context.fillStyle = style("--muted");
    const half = 18;
    context.fillText(
      markText(mark - origin, window[1] - window[0]),
      Math.min(width - half, Math.max(GUTTER + half - 8, x)),
      AXIS / 2,
    );
  }
}

/** @param {CanvasRenderingContext2D} context @param {Lane} lane @param {(time: number) => number} x @param {boolean} dark */
function drawSpans(context, lane, x, dark) {
  if (lane.episode) {
    const [from, to] = [Math.max(GUTTER, x(lane.episode.begin)), x(lane.episode.end)];
    context.fillStyle = kindColour("idle", dark);
    context.fillRect(from, lane.top, Math.max(1, to - from), lane.height);
  }
  let reach = -Infinity;
  for (const span of lane.spans) {
    const [from, to] = [x(span.begin), x(span.end)];
    if (to < GUTTER || (to <= reach && to - from < 0.4)) continue; // it would change no pixel
    reach = Math.max(reach, from + 0.4);
    context.fillStyle =
      lane.kind === "server"
        ? faded(kindColour(span.kind === "up" ? "train" : "failed", dark), span.kind === "up" ? 0.35 : 0.9)
        : kindColour(span.kind, dark);
    const width = Math.max(lane.kind === "push" ? 2 : 0.7, to - from - (to - from > 4 ? 0.6 : 0));
    const left = Math.max(from, GUTTER);
    context.fillRect(left, lane.top, from + width - left, lane.height);
    if (lane.kind === "trainer" && width > 56) {
      context.fillStyle = inkOn(kindColour(span.kind, dark));
      context.font = "11px system-ui, sans-serif";
      context.textAlign = "left";
      context.textBaseline = "middle";
      context.fillText(
        shorten(words(span.kind), Math.floor(width / 7)),
        left + 5,
        lane.top + lane.height / 2 + 0.5,
      );
    }
  }
  const stop = lane.episode?.stop_reason;
  if (stop && !["done", "max_turns", "max_tokens", "context_full"].includes(stop)) {
    context.fillStyle = kindColour("failed", dark);
    context.fillRect(x(lane.episode.end) - 1, lane.top - 1, 3, lane.height + 2);
  }
}

/** @param {CanvasRenderingContext2D} context @param {any} counts @param {Lane} lane @param {(time: number) => number} x @param {boolean} dark @param {(name: string) => string} style */
function drawCounts(context, counts, lane, x, dark, style) {
  const { kinds, sums, most } = countLayers(counts);
  const y = (/** @type {number} */ value) => lane.top + lane.height - (value / most) * (lane.height - 4);
  for (let layer = kinds.length - 1; layer >= 0; layer -= 1) {
    context.fillStyle = kinds[layer] === "other" ? kindColour("idle", dark) : kindColour(kinds[layer], dark);
    context.beginPath();
    context.moveTo(x(counts.time[0]), y(0));
    sums[layer].forEach((value, index) => {
      context.lineTo(x(counts.time[index]), y(value));
      context.lineTo(x(counts.time[index] + counts.interval), y(value));
    });
    context.lineTo(x(counts.time[counts.time.length - 1] + counts.interval), y(0));
    context.fill();
  }
  context.strokeStyle = style("--line");
  context.strokeRect(GUTTER + 0.5, lane.top + 0.5, 4000, lane.height);
}

/** Return the areas of the counts, the lowest first, and the most episodes at a time. @param {any} counts */
function countLayers(counts) {
  const kinds = COUNT_KINDS.filter((kind) => counts[kind]?.some((/** @type {number} */ value) => value > 0));
  const sums = stack(kinds.map((kind) => counts[kind]));
  return { kinds, sums, most: Math.max(1, ...(sums.at(-1) ?? [1])) };
}

/**
 * Return the text about what lies at a point.
 * @param {{lane: Lane, span: Lane["spans"][0] | null}} hit
 * @param {any} answer `Lanes` in answers/lanes.py.
 * @param {number} time
 * @returns {string[]} Lines.
 */
export function hitText({ lane, span }, answer, time) {
  if (lane.kind === "counts")
    return [
      countsText(answer.counts, time) || "no episodes",
      answer.counts.share < 1 ? `estimated from ${percent(answer.counts.share)} of the episodes` : "",
    ];
  const lines = [];
  if (span) lines.push(`${span.text} \u00b7 ${duration(span.end - span.begin)}`, ...(span.more ? [span.more] : []));
  else if (lane.episode) lines.push(KIND_NAMES.other);
  else if (lane.kind === "trainer") lines.push("no phase: nothing was at work, or it ran beside others");
  if (lane.episode) {
    const { label, step, stop_reason: stop, begin, end } = lane.episode;
    lines.push(
      `episode ${label}, ${placeName(step)} \u00b7 ${stop ? words(stop) : "unfinished"} after ${duration(end - begin)}`,
    );
    const isInside = time >= begin && time <= end;
    if (!isInside && !span) lines.shift();
  }
  return lines;
}
