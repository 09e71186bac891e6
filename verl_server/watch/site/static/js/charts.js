/**
 * `ChartGrid`: charts over training steps, with one cursor, one zoom and the same colours of runs for all of them.
 *
 * `overview` gives it the tables of the runs. Dragging over a chart zooms all of them, a double click shows everything
 * again, a click opens the step. Charts have fixed sizes, so that live data move nothing.
 */

import { uPlot } from "./uplot.js";
import { h, isDark, setText, styleValue } from "./dom.js";
import { faded, kindColour, runColour } from "./colours.js";
import { drawOver, isTold, NOT_FINITE, pointSeries } from "./chartmarks.js";
import { figure, words } from "./format.js";
import { decades, decayFor, extent, finiteParts, joinTables, positive, smooth, stack } from "./series.js";

/**
 * @typedef {object} ChartSpec
 * @property {string} id
 * @property {string} title
 * @property {string} [hint] What the figure says, as the title of the heading.
 * @property {(table: RunTable) => Line[]} lines The lines of a run; [] if the run has none.
 * @property {boolean} [log] Logarithmic axis.
 * @property {boolean} [zero] The axis begins at 0.
 * @property {boolean} [stacked] Areas of one run that lie on each other.
 * @property {(value: unknown) => string} [format]
 * @property {(step: number) => string} [place] What a click opens: the step itself without it.
 * @property {(tables: RunTable[], step: number) => string} [note] What is said beside the step of the cursor.
 * @property {boolean} [optional] Runs of some kinds have it, so that others do not say that it is missing.
 */
/**
 * @typedef {object} Line
 * @property {string} name
 * @property {(number | null)[]} values
 * @property {(number | null)[]} [low]
 * @property {(number | null)[]} [high]
 * @property {number[]} [step] Steps of the values, if they are not those of the table.
 * @property {"points" | "hollow" | "ring"} [style] Points that a line joins; hollow points, or rings, without a line.
 */
/**
 * @typedef {object} RunTable
 * @property {string} id
 * @property {string} name
 * @property {number} index Place in the list of runs, which gives the colour.
 * @property {number[]} step
 * @property {(name: string) => Line | null} column
 * @property {string[]} names Names of all columns.
 * @property {any[]} evaluations `Evaluation` in answers/evaluations.py, by their steps.
 */

const HEIGHT = 168;
const SYNC = "steps";
const CLICK_PAUSE = 230;
const MOST_VALUES = 8;

export class ChartGrid {
  /**
   * @param {ChartSpec[]} specs
   * @param {object} handlers
   * @param {(run: string, step: number | string) => void} handlers.onOpen
   * @param {(zoom: [number, number] | null) => void} handlers.onZoom
   */
  constructor(specs, { onOpen, onZoom }) {
    this.onOpen = onOpen;
    this.onZoom = onZoom;
    /** @type {[number, number] | null} */
    this.zoom = null;
    /** @type {RunTable[]} */
    this.tables = [];
    this.element = h("div", { class: "charts" });
    this.charts = specs.map((spec) => new Chart(spec, this));
    this.element.append(...this.charts.map((chart) => chart.element));
    this.sizes = new ResizeObserver(() => this.#resize());
    this.sizes.observe(this.element);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.recolour = () => this.charts.forEach((chart) => chart.rebuild());
    this.scheme.addEventListener("change", this.recolour);
  }

  destroy() {
    this.sizes.disconnect();
    this.scheme.removeEventListener("change", this.recolour);
    this.charts.forEach((chart) => chart.destroy());
  }

  /**
   * Show the tables of the visible runs.
   * @param {RunTable[]} tables
   * @param {Record<string, number[]>} bounds Id of a chart -> bounds of advisories, which it draws.
   * @returns {string[]} Titles of the charts without data, which are hidden. Optional ones are left out.
   */
  setTables(tables, bounds) {
    this.tables = tables;
    for (const chart of this.charts) chart.bounds = bounds[chart.spec.id] ?? [];
    const missing = this.charts.filter((chart) => !chart.show(tables) && !chart.spec.optional);
    return missing.map((chart) => chart.spec.title);
  }

  /** Put a chart before all others, and mark it. @param {string} id "" for none. */
  mark(id) {
    for (const { spec, element } of this.charts) element.classList.toggle("marked", spec.id === id);
    this.element.querySelector(".marked")?.scrollIntoView({ block: "nearest" });
  }

  /** @param {[number, number] | null} zoom */
  setZoom(zoom) {
    this.zoom = zoom;
    for (const chart of this.charts) chart.applyZoom();
  }

  /** The first and last step that the charts show. @returns {[number, number]} */
  get range() {
    if (this.zoom) return this.zoom;
    return extent(this.tables.flatMap((table) => [table.step, table.evaluations.map(({ step }) => step)]));
  }

  #resize() {
    for (const chart of this.charts) chart.resize();
  }
}

class Chart {
  /** @param {ChartSpec} spec @param {ChartGrid} grid */
  constructor(spec, grid) {
    this.spec = spec;
    this.grid = grid;
    /** @type {any} */
    this.plot = null;
    this.shape = "";
    /** @type {{table: RunTable, line: Line, smooth: (number | null)[], raw: (number | null)[], marks: number[], band: (number | null)[][] | null}[]} */
    this.lines = [];
    /** @type {number[]} */
    this.x = [];
    /** @type {number[]} */
    this.bounds = [];
    this.clickTimer = 0;
    this.title = h("h3", { title: spec.hint }, spec.title);
    this.at = h("span", { class: "chart-at" });
    this.values = h("div", { class: "chart-values" });
    this.body = h("div", { class: "chart-body", role: "img", tabindex: "0" });
    const head = h("figcaption", {}, this.title, this.at);
    this.element = h("figure", { class: "chart", data: { chart: spec.id } }, head, this.values, this.body);
    this.body.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => this.#key(event));
  }

  destroy() {
    clearTimeout(this.clickTimer);
    this.plot?.destroy();
    this.plot = null;
  }

  /** @param {RunTable[]} tables @returns {boolean} True if there is something to show. */
  show(tables) {
    const used = this.spec.stacked ? tables.filter((table) => this.spec.lines(table).length).slice(0, 1) : tables;
    const found = used.map((table) => ({ table, lines: this.spec.lines(table) })).filter(({ lines }) => lines.length);
    this.element.hidden = !found.length;
    if (!found.length) {
      this.destroy();
      return false;
    }
    const lines = found.flatMap((each) => each.lines.map((line) => ({ table: each.table, line })));
    const joined = joinTables(
      lines.map(({ table, line }) => ({
        x: line.step ?? table.step,
        columns: [line.values, line.low ?? [], line.high ?? []],
      })),
    );
    this.x = joined.x;
    this.lines = lines.map(({ table, line }, index) => this.#prepared(table, line, joined.columns[index]));
    this.#draw();
    this.#describe();
    this.#readout(this.plot.cursor.idx ?? null);
    return true;
  }

  /** @param {RunTable} table @param {Line} line @param {(number | null)[][]} columns */
  #prepared(table, line, [values, low, high]) {
    const { drawn, marks } = finiteParts(values);
    const raw = this.spec.log ? positive(drawn) : drawn;
    const band =
      line.low && line.high && !this.spec.stacked && !this.spec.log
        ? [finiteParts(low).drawn, finiteParts(high).drawn]
        : null;
    const decay = this.spec.stacked || line.style ? 0 : decayFor(table.step);
    return { table, line: { ...line, values }, raw, marks, band, smooth: decay ? smooth(this.x, raw, decay) : raw };
  }

  /** Make a new plot if the series are others, else give the plot the new data. */
  #draw() {
    const shape = JSON.stringify(
      this.lines.map(({ table, line, band, smooth: soft, raw }) => [
        table.id,
        table.index,
        line.name,
        line.style,
        !!band,
        soft === raw,
      ]),
    );
    const data = this.#data();
    if (this.plot && shape === this.shape) {
      const [min, max] = this.grid.range;
      this.plot.batch(() => {
        this.plot.setData(data, false);
        this.plot.setScale("x", { min, max });
      });
      return;
    }
    this.shape = shape;
    this.plot?.destroy();
    this.plot = new /** @type {any} */ (uPlot)(this.#options(), data, this.body);
    this.plot.over.addEventListener("click", (/** @type {MouseEvent} */ event) => this.#click(event));
    this.applyZoom();
  }

  rebuild() {
    this.shape = "";
    if (this.plot) this.#draw();
  }

  #data() {
    if (this.spec.stacked) return [this.x, ...stack(this.lines.map(({ raw }) => raw)).reverse()];
    return [
      this.x,
      ...this.lines.flatMap(({ raw, smooth: soft, band }) => [...(band ?? []), raw, ...(soft === raw ? [] : [soft])]),
    ];
  }

  #options() {
    const dark = isDark();
    const ink = styleValue("--muted");
    const grid = { stroke: styleValue("--grid"), width: 1 };
    const font = `11px ${styleValue("--sans")}`;
    const axis = { stroke: ink, grid, ticks: { show: false }, font, gap: 4 };
    const format = this.spec.format ?? figure;
    const bands = /** @type {any[]} */ ([]);
    return {
      width: Math.max(120, this.body.clientWidth),
      height: HEIGHT,
      padding: [8, 10, 0, 0],
      legend: { show: false },
      cursor: {
        sync: { key: SYNC, setSeries: false },
        drag: { x: true, y: false, setScale: false, dist: 5 },
        points: { size: 6 },
        y: false,
        bind: {
          dblclick: () => () => {
            clearTimeout(this.clickTimer);
            this.grid.onZoom(null);
          },
        },
      },
      scales: { x: { time: false }, y: this.spec.log ? { distr: 3, range: decades } : { range: this.#rangeOf.bind(this) } },
      axes: [
        {
          ...axis,
          size: 24,
          space: 50,
          incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5],
        },
        {
          ...axis,
          size: 52,
          space: 28,
          values: (/** @type {any} */ _, /** @type {any[]} */ at) =>
            at.map((each) => (each === null ? "" : format(each))),
        },
      ],
      series: [{}, ...(this.spec.stacked ? this.#areas(dark) : this.#strokes(dark, bands))],
      bands,
      hooks: {
        setCursor: [
          (/** @type {any} */ plot) => this.#readout(plot.cursor.left < 0 ? null : (plot.cursor.idx ?? null)),
        ],
        setSelect: [(/** @type {any} */ plot) => this.#selected(plot)],
        draw: [(/** @type {any} */ plot) => drawOver(plot, this)],
      },
    };
  }

  /** @param {boolean} dark */
  #areas(dark) {
    return this.lines
      .map(({ line }) => ({
        stroke: kindColour(line.name, dark),
        fill: faded(kindColour(line.name, dark), 0.72),
        width: 1,
        points: { show: false },
      }))
      .reverse();
  }

  /** @param {boolean} dark @param {any[]} bands */
  #strokes(dark, bands) {
    let at = 1;
    return this.lines.flatMap(({ table, line, raw, smooth: soft, band }, index) => {
      const colour = runColour(table.index, dark);
      if (line.style) {
        at += 1;
        return [{ ...pointSeries(line.style, colour), label: line.name }];
      }
      const dash = this.#dash(index);
      const isSmooth = soft !== raw;
      const series = [];
      if (band) {
        bands.push({ series: [at + 1, at], fill: faded(colour, 0.14) });
        series.push(...[0, 1].map(() => ({ stroke: "transparent", width: 0, points: { show: false } })));
      }
      series.push({
        stroke: isSmooth ? faded(colour, 0.4) : colour,
        width: isSmooth ? 1 : 1.6,
        dash,
        spanGaps: true,
        points: { show: this.x.length <= 60, size: 4, fill: colour },
      });
      if (isSmooth) series.push({ stroke: colour, width: 2, dash, spanGaps: true, points: { show: false } });
      at += series.length;
      return series.map((each) => ({ ...each, label: line.name }));
    });
  }

  /** Lines after the first one of a run are dashed. @param {number} index */
  #dash(index) {
    const isFirst = this.lines.findIndex(({ table }) => table === this.lines[index].table) === index;
    return isFirst ? undefined : [5, 4];
  }

  /** @param {any} _ @param {number | null} low @param {number | null} high @returns {[number, number]} */
  #rangeOf(_, low, high) {
    if (low === null || high === null) return [0, 1];
    const from = this.spec.zero || this.spec.stacked ? Math.min(0, low) : low;
    const pad = (high - from || Math.abs(high) || 1) * 0.08;
    return [from === 0 ? 0 : from - pad, high + pad];
  }

  applyZoom() {
    if (!this.plot) return;
    const [min, max] = this.grid.range;
    this.plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.plot.setScale("x", { min, max });
  }

  resize() {
    const width = this.body.clientWidth;
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }

  /** @param {any} plot */
  #selected(plot) {
    const { left, width } = plot.select;
    if (width < 5) return;
    const low = plot.posToVal(left, "x");
    const high = plot.posToVal(left + width, "x");
    if (high > low) this.grid.onZoom([Math.round(1000 * low) / 1000, Math.round(1000 * high) / 1000]);
  }

  /** Open the step under a click, unless a second click follows. @param {MouseEvent} event */
  #click(event) {
    const index = this.plot?.cursor.idx;
    if (index === null || index === undefined || this.plot.select.width > 0) return;
    const box = this.plot.over.getBoundingClientRect();
    const value = this.plot.posToVal(event.clientY - box.top, "y");
    clearTimeout(this.clickTimer);
    this.clickTimer = window.setTimeout(() => this.#open(index, value), CLICK_PAUSE);
  }

  /** @param {number} index @param {number | null} value */
  #open(index, value) {
    const has = (/** @type {any} */ { line, table }) => (line.step ?? table.step).includes(this.x[index]);
    const known = this.lines.filter((each) => each.raw[index] !== null || has(each));
    const far = (/** @type {any} */ line) =>
      value === null || line.raw[index] === null ? Infinity : Math.abs(line.raw[index] - value);
    const nearestLine = known.sort((a, b) => far(a) - far(b))[0];
    const step = this.x[index];
    if (nearestLine) this.grid.onOpen(nearestLine.table.id, this.spec.place ? this.spec.place(step) : step);
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (!this.plot || !["ArrowLeft", "ArrowRight", "Enter"].includes(event.key)) return;
    event.preventDefault();
    const now = this.plot.cursor.idx ?? this.x.length - 1;
    if (event.key === "Enter") return this.#open(now, null);
    const next = Math.min(this.x.length - 1, Math.max(0, now + (event.key === "ArrowLeft" ? -1 : 1)));
    this.plot.setCursor({ left: this.plot.valToPos(this.x[next], "x"), top: 20 });
  }

  /** Tell the values at an index in the head of the chart, the newest one of each line without a cursor. @param {number | null} index */
  #readout(index) {
    const note = index === null ? "" : (this.spec.note?.(this.grid.tables, this.x[index]) ?? "");
    setText(this.at, index === null ? "newest" : `step ${this.x[index]}${note ? ` \u00b7 ${note}` : ""}`);
    const format = this.spec.format ?? figure;
    const dark = isDark();
    const isNamed = this.spec.stacked || new Set(this.lines.map(({ line }) => line.name)).size > 1;
    const told = this.lines.filter(({ line }) => isTold(line, index)).slice(0, MOST_VALUES);
    while (this.values.children.length < told.length)
      this.values.append(h("span", { class: "chart-value" }, h("i", {}), h("b", {}), h("small", {})));
    while (this.values.children.length > told.length) this.values.lastElementChild.remove();
    told.forEach(({ table, line }, number) => {
      const [mark, value, name] = this.values.children[number].children;
      mark.style.background = this.spec.stacked ? kindColour(line.name, dark) : runColour(table.index, dark);
      setText(value, format(index === null ? line.values.findLast((each) => each !== null) : line.values[index]));
      setText(name, isNamed ? words(line.name) : "");
      this.values.children[number].title = `${table.name}: ${line.name}`;
    });
  }

  #describe() {
    const format = this.spec.format ?? figure;
    const texts = this.lines.slice(0, 6).map(({ table, line }) => {
      const last = line.values.findLast((each) => each !== null);
      const odd = line.values.filter((each) => each !== null && !Number.isFinite(each)).length;
      return `${table.name} ${line.name}: ${format(last)}${odd ? ` (${odd} ${NOT_FINITE})` : ""}`;
    });
    this.body.setAttribute(
      "aria-label",
      `${this.spec.title} over steps; the newest values: ${texts.join(", ")}. Arrow keys move the cursor, Enter opens the step.`,
    );
  }
}
