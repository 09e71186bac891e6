/**
 * The view Who waits: who was at work, who waited for whom, over time. `main` opens it for `#/waits/RUN?from&to`.
 *
 * Dragging zooms, the wheel with Shift pans and with Ctrl zooms, a double click shows everything, a click on an
 * episode opens it. The lanes of a new window are asked for; until they are there, the old ones are drawn in it.
 */

import { kindColour } from "./colours.js";
import { canvasContext, emptyState, errorState, fill, foreign, h, isDark, loadingState, styleValue } from "./dom.js";
import { duration, evaluationPlace, moment, percent, whole, words } from "./format.js";
import { GUTTER, KIND_NAMES, drawLanes, hitText, laneAt, layoutLanes, xToTime } from "./lanes.js";
import { address, link } from "./places.js";
import { panned, zoomed } from "./timeaxis.js";

const ASK_PAUSE = 160;
const FOLLOW_PAUSE = 2000;
/** @type {Record<string, string>} */
const IDLE_HINTS = {
  trainer: "share of the time in which the trainer ran no phase of its own",
  generation: "share of the time in which no episode generated",
  environments: "share of the time in which no episode waited for its environment",
};

/** @param {import("./main.js").Page} page @returns {import("./main.js").View} */
export function createWaits(page) {
  return new Waits(page);
}

class Waits {
  /** @param {import("./main.js").Page} page */
  constructor(page) {
    this.page = page;
    this.head = h("div", { class: "view-head" });
    this.legend = h("div", { class: "legend" });
    this.notes = h("div", { class: "note" });
    this.canvas = h("canvas", { class: "lanes", tabindex: "0", role: "img", "aria-label": "Lanes over time" });
    this.shade = h("div", { class: "shade", hidden: true });
    this.tip = h("div", { class: "tip", hidden: true });
    this.stage = h("div", { class: "stage" }, this.canvas, this.shade);
    this.body = h("div", { class: "fill scroll" }, loadingState());
    this.element = h("div", { class: "page full" }, this.head, this.legend, this.body, this.notes, this.tip);
    this.run = "";
    /** @type {any} */
    this.answer = null;
    /** @type {[number, number]} */
    this.window = [0, 1];
    /** @type {import("./lanes.js").Lane[]} */
    this.lanes = [];
    this.height = 0;
    /** @type {import("./lanes.js").Lane | null} */
    this.marked = null;
    this.selected = -1;
    this.askTimer = 0;
    this.clickTimer = 0;
    this.followTimer = 0;
    /** @type {number | null} */
    this.dragFrom = null;
    this.sizes = new ResizeObserver(() => this.#draw());
    this.sizes.observe(this.body);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.redraw = () => {
      this.#draw();
      this.#drawLegend();
    };
    this.scheme.addEventListener("change", this.redraw);
    this.#listen();
  }

  destroy() {
    this.sizes.disconnect();
    this.scheme.removeEventListener("change", this.redraw);
    for (const timer of [this.askTimer, this.followTimer, this.clickTimer]) clearTimeout(timer);
    this.isGone = true;
  }

  /** @param {import("./places.js").Place} place */
  async update(place) {
    const run = place.parts[0] ?? this.page.currentRun?.id ?? "";
    if (run !== this.run) this.answer = null;
    this.run = run;
    this.query = { from: place.query.from, to: place.query.to };
    if (!run) return void fill(this.body, emptyState("No runs"));
    await this.#load();
  }

  get isZoomed() {
    return Boolean(this.query?.from && this.query?.to);
  }

  async #load() {
    const asked = (this.asked = {});
    const { api } = this.page;
    const url = address(["runs", this.run, "lanes"], this.query);
    const answer = await api.get(api.has(url) ? url : address(["runs", this.run, "lanes"]));
    if (this.isGone || asked !== this.asked) return;
    this.answer = answer;
    if (this.isZoomed) this.window = [Number(this.query?.from), Number(this.query?.to)];
    else this.window = [answer.begin ?? 0, answer.end ?? 1];
    ({ lanes: this.lanes, height: this.height } = layoutLanes(answer));
    this.#drawHead();
    this.#drawLegend();
    if (answer.begin === null || !this.lanes.length) {
      fill(
        this.body,
        emptyState(
          "No times are known",
          "The lanes come from the events of a training run and from the times of its episodes; both appear here while it runs.",
        ),
        ...this.answer.notes.map((/** @type {string} */ note) => h("p", { class: "note" }, foreign(note))),
      );
      return;
    }
    if (!this.body.contains(this.stage)) fill(this.body, this.stage);
    this.#draw();
  }

  #draw() {
    const width = this.body.clientWidth;
    if (!this.answer || !width || this.isGone || !this.body.contains(this.stage)) return;
    const context = canvasContext(this.canvas, width, this.height);
    drawLanes(context, {
      answer: this.answer,
      lanes: this.lanes,
      window: this.window,
      width,
      height: this.height,
      marked: this.marked,
      dark: isDark(),
      style: styleValue,
    });
  }

  #drawHead() {
    const { answer } = this;
    const idle = Object.entries(answer.idle).map(([name, share]) => {
      const number = Number(share);
      return h(
        "span",
        { class: "idle", title: IDLE_HINTS[name] ?? "" },
        h("small", {}, `${words(name)} idle`),
        h("b", { class: number > 0.5 ? "warn-text" : null }, percent(share)),
        h(
          "span",
          { class: "bar", "aria-hidden": "true" },
          h("i", { style: { width: `${Math.round(100 * (number || 0))}%` } }),
        ),
      );
    });
    const begin = h(
      "span",
      { class: "muted" },
      answer.begin === null ? "" : `${moment(this.window[0])} \u00b7 ${duration(this.window[1] - this.window[0])}`,
    );
    const all = this.isZoomed
      ? h("button", { type: "button", on: { click: () => this.#zoom(null) } }, "Show everything")
      : null;
    fill(this.head, h("h1", {}, "Who waits"), ...idle, h("span", { class: "spacer" }), begin, all);
    const shown = answer.episodes.length;
    const sampled =
      answer.total > shown ? `${whole(shown)} of ${whole(answer.total)} episodes have a lane, evenly chosen. ` : "";
    fill(
      this.notes,
      sampled,
      answer.counts.share < 1 ? "The counts are estimated from an even choice. " : "",
      ...answer.notes.map((/** @type {string} */ note) => foreign(`${note} `)),
    );
  }

  #drawLegend() {
    const dark = isDark();
    const kindsOf = (/** @type {string} */ kind) =>
      this.lanes.filter((lane) => lane.kind === kind).flatMap((lane) => lane.spans.map((span) => span.kind));
    const phases = [...new Set([...kindsOf("trainer"), ...kindsOf("evaluation")])];
    const kinds = this.answer?.episodes.length ? ["generate", "env", "queue"] : [];
    const entry = (/** @type {string} */ colour, /** @type {string} */ text) =>
      h("span", { class: "legend-entry" }, h("i", { style: { background: colour } }), text);
    fill(
      this.legend,
      kinds.map((kind) => entry(kindColour(kind, dark), KIND_NAMES[kind])),
      kinds.length ? entry(kindColour("idle", dark), KIND_NAMES.other) : null,
      phases.length ? h("span", { class: "legend-title" }, "trainer:") : null,
      phases.map((phase) => entry(kindColour(phase, dark), KIND_NAMES[phase] ?? words(phase))),
      h("span", { class: "spacer" }),
      h("span", { class: "muted" }, "drag to zoom \u00b7 Shift + wheel pans \u00b7 double click for everything"),
    );
  }

  /** Show another window, and ask for its lanes after a pause. @param {[number, number] | null} window */
  #zoom(window) {
    const { first, last } = this.answer;
    if (window) {
      this.window = window;
      const digits = window[1] - window[0] < 10 ? 3 : 1;
      this.query = { from: window[0].toFixed(digits), to: window[1].toFixed(digits) };
    } else {
      this.window = [first, last];
      this.query = { from: "", to: "" };
    }
    this.page.replace(link("waits", [this.run], this.query));
    this.#draw();
    clearTimeout(this.askTimer);
    this.askTimer = setTimeout(
      () => void this.#load().catch((error) => fill(this.notes, errorState(error))),
      ASK_PAUSE,
    );
  }

  /** @returns {[number, number]} */
  get limits() {
    const { first, last, begin, end } = this.answer;
    return [Math.min(first ?? begin, begin), Math.max(last ?? end, end)];
  }

  #listen() {
    const { canvas } = this;
    canvas.addEventListener("pointerdown", (/** @type {PointerEvent} */ event) => {
      if (event.button !== 0 || event.offsetX < GUTTER) return;
      this.dragFrom = event.offsetX;
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => this.#point(event));
    canvas.addEventListener("pointerup", (/** @type {PointerEvent} */ event) => this.#release(event));
    canvas.addEventListener("pointerleave", () => this.#leave());
    canvas.addEventListener("dblclick", () => {
      clearTimeout(this.clickTimer);
      this.#zoom(null);
    });
    canvas.addEventListener("wheel", (/** @type {WheelEvent} */ event) => this.#wheel(event), { passive: false });
    canvas.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      if (this.#canvasKey(event.key)) event.preventDefault();
    });
  }

  /** @param {PointerEvent} event */
  #point(event) {
    const width = this.canvas.clientWidth;
    if (this.dragFrom !== null) {
      const [from, to] = [this.dragFrom, Math.max(GUTTER, event.offsetX)].sort((a, b) => a - b);
      this.shade.hidden = to - from < 4;
      this.shade.style.left = `${from}px`;
      this.shade.style.width = `${to - from}px`;
      this.tip.hidden = true;
      return;
    }
    const time = xToTime(event.offsetX, this.window, width);
    const slack = (3 / Math.max(1, width - GUTTER)) * (this.window[1] - this.window[0]);
    const hit = laneAt(this.lanes, time, event.offsetY, slack);
    this.#mark(hit?.lane ?? null);
    const lines = hit && event.offsetX >= GUTTER ? hitText(hit, this.answer, time) : hit ? [hit.lane.name] : [];
    this.#showTip(lines.filter(Boolean), event);
    this.canvas.style.cursor = hit?.lane.episode || hit?.span?.evaluation !== undefined ? "pointer" : "crosshair";
  }

  /** @param {string[]} lines @param {PointerEvent} event */
  #showTip(lines, event) {
    this.tip.hidden = !lines.length;
    if (!lines.length) return;
    fill(
      this.tip,
      lines.map((line) => h("div", {}, foreign(line))),
    );
    const x = Math.min(event.clientX + 14, innerWidth - this.tip.offsetWidth - 12);
    const y =
      event.clientY + 18 + this.tip.offsetHeight > innerHeight
        ? event.clientY - this.tip.offsetHeight - 12
        : event.clientY + 18;
    this.tip.style.transform = `translate(${Math.max(8, x)}px, ${y}px)`;
  }

  /** @param {PointerEvent} event */
  #release(event) {
    const from = this.dragFrom;
    this.dragFrom = null;
    this.shade.hidden = true;
    if (from === null) return;
    const width = this.canvas.clientWidth;
    const [left, right] = [from, Math.max(GUTTER, event.offsetX)].sort((a, b) => a - b);
    if (right - left >= 5) return this.#zoom([xToTime(left, this.window, width), xToTime(right, this.window, width)]);
    const hit = laneAt(this.lanes, xToTime(event.offsetX, this.window, width), event.offsetY, 0);
    if (hit?.lane.episode) this.page.go(link("episode", [this.run, hit.lane.episode.row]));
    else if (hit?.span) {
      const { step, evaluation } = hit.span;
      const place = evaluation === undefined ? step : evaluationPlace(evaluation);
      if (place !== undefined)
        this.clickTimer = setTimeout(() => this.page.go(link("step", [this.run, place])), 240);
    }
  }

  #leave() {
    this.tip.hidden = true;
    this.#mark(null);
  }

  /** @param {import("./lanes.js").Lane | null} lane */
  #mark(lane) {
    if (lane === this.marked) return;
    this.marked = lane;
    this.#draw();
  }

  /** @param {WheelEvent} event */
  #wheel(event) {
    const isPan = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!this.answer || (!isPan && !event.ctrlKey)) return;
    event.preventDefault();
    const span = this.window[1] - this.window[0];
    const turned = event.deltaX || event.deltaY;
    const center = xToTime(event.offsetX, this.window, this.canvas.clientWidth);
    this.#zoom(
      isPan
        ? panned(this.window, (turned / 800) * span, this.limits)
        : zoomed(this.window, Math.exp(event.deltaY / 300), center, this.limits),
    );
  }

  /** @param {string} key */
  #canvasKey(key) {
    const span = this.window[1] - this.window[0];
    if (key === "ArrowLeft") this.#zoom(panned(this.window, -span / 5, this.limits));
    else if (key === "ArrowRight") this.#zoom(panned(this.window, span / 5, this.limits));
    else return false;
    return true;
  }

  /** @param {string} key */
  key(key) {
    if (!this.answer || this.answer.begin === null) return false;
    const center = (this.window[0] + this.window[1]) / 2;
    if (key === "+" || key === "=") this.#zoom(zoomed(this.window, 0.5, center, this.limits));
    else if (key === "-") this.#zoom(zoomed(this.window, 2, center, this.limits));
    else if (key === "0") this.#zoom(null);
    else if (key === "j" || key === "k") this.#select(key === "j" ? 1 : -1);
    else if (key === "Enter" && this.marked?.episode && !document.activeElement?.closest("a, button"))
      this.page.go(link("episode", [this.run, this.marked.episode.row]));
    else return false;
    return true;
  }

  /** @param {number} by */
  #select(by) {
    const episodes = this.lanes.filter((lane) => lane.episode);
    if (!episodes.length) return;
    this.selected = Math.min(episodes.length - 1, Math.max(0, this.selected + by));
    const lane = episodes[this.selected];
    this.#mark(lane);
    const { scrollTop, clientHeight } = this.body;
    if (lane.top < scrollTop || lane.top > scrollTop + clientHeight - 30)
      this.body.scrollTop = lane.top - clientHeight / 2;
    this.page.say(hitText({ lane, span: null }, this.answer, lane.episode.begin).join(", "));
  }

  /** @param {any} event */
  grew(event) {
    if (event.run !== this.run || this.followTimer || this.isZoomed || this.dragFrom !== null) return;
    this.followTimer = setTimeout(() => {
      this.followTimer = 0;
      if (!this.isGone && !this.isZoomed && this.dragFrom === null) void this.#load().catch(() => {});
    }, FOLLOW_PAUSE);
  }
}
