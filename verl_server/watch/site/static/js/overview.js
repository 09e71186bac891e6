/**
 * The view Overview: what is wrong with the runs, how they are, and their figures over the steps.
 *
 * `main` opens it for `#/`. The query has the hidden runs (`off`), the zoom (`from`, `to`), further charts (`more`), and
 * the chart that comes first (`chart`).
 */

import { AdvisoryList } from "./advisories.js";
import { EvaluationTable, loadEvaluations } from "./evaluations.js";
import { chartBounds } from "./causes.js";
import { ChartGrid } from "./charts.js";
import { runColour } from "./colours.js";
import { badge, emptyState, errorState, fill, foreign, h, isDark, loadingState, setText, timeText } from "./dom.js";
import { CHARTS, chartOf, runTable } from "./figures.js";
import { ago, counted, duration, figure, moment, whole, words } from "./format.js";
import { address, link } from "./places.js";
import { settingsThatDiffer } from "./settings.js";

const LEAST_PAUSE = 1000;
const MOST_DRAWN = 12;
/** @type {Record<string, string>} */
export const STATE_TONES = { running: "info", ended: "good", failed: "bad", unknown: "warn", new: "" };
/** @type {Record<string, string>} */
const STATE_HINTS = {
  running: "A process writes these files.",
  ended: "The run is complete.",
  failed: "The run ended with an error.",
  unknown: "No process writes these files, and the run has no end: it was killed.",
  new: "Nothing is recorded yet.",
};

/** @param {import("./main.js").Page} page @returns {import("./main.js").View} */
export function createOverview(page) {
  return new Overview(page);
}

class Overview {
  /** @param {import("./main.js").Page} page */
  constructor(page) {
    this.page = page;
    this.advisories = new AdvisoryList();
    this.evaluationTable = new EvaluationTable();
    this.runList = h("section", { class: "runs", "aria-label": "Runs" });
    this.note = h("p", { class: "note" });
    this.chartPlace = h("div", { "aria-busy": "true" }, loadingState("Loading the figures"));
    this.tools = h("div", { class: "chart-tools" });
    this.element = h(
      "div",
      { class: "page" },
      this.runList,
      this.advisories.element,
      this.evaluationTable.element,
      this.tools,
      this.chartPlace,
      this.note,
    );
    /** @type {Map<string, any>} */
    this.metrics = new Map();
    /** @type {Map<string, {evaluations: any[], playing: number | null}>} */
    this.evaluations = new Map();
    /** @type {Map<string, any>} */
    this.found = new Map();
    /** @type {Map<string, number>} */
    this.asked = new Map();
    /** @type {ChartGrid | null} */
    this.grid = null;
    this.more = "";
    this.timer = window.setInterval(() => this.#drawRuns(), 15000);
    this.comparison = null;
    this.isFirst = true;
    this.frame = 0;
  }

  destroy() {
    clearInterval(this.timer);
    this.grid?.destroy();
    this.isGone = true;
  }

  /** @param {import("./places.js").Place} place */
  async update(place) {
    this.query = place.query;
    this.#drawRuns();
    if (!this.page.runs.length) {
      this.chartPlace.setAttribute("aria-busy", "false");
      fill(
        this.chartPlace,
        emptyState("No runs", "Give `verl-server watch` the folder of a run, or a folder that has runs inside."),
      );
      return;
    }
    const more = place.query.more ?? "";
    if (!this.grid || more !== this.more) this.#makeGrid(more);
    this.#applyZoom();
    if (this.isFirst) await Promise.all(this.page.runs.map((run) => this.#load(run).then(() => this.#drawSoon())));
    this.isFirst = false;
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.#drawAdvisories();
    this.#drawRuns();
    this.#drawCharts();
    this.grid?.mark(place.query.chart ?? "");
    this.chartPlace.setAttribute("aria-busy", "false"); // charts of runs that arrive later are made anew
  }

  /** @param {any} event */
  grew(event) {
    const run = this.page.run(event.run);
    if (!run || this.asked.has(run.id)) return;
    const pause = LEAST_PAUSE + (this.page.runs.length > 8 ? 2000 : 0);
    this.asked.set(
      run.id,
      window.setTimeout(() => void this.#reload(run), pause),
    );
    this.#drawRuns();
  }

  /** @param {any} run */
  async #reload(run) {
    this.asked.delete(run.id);
    if (this.isGone) return;
    await this.#load(run);
    this.#drawRuns();
    this.#drawCharts();
  }

  /** @param {any} run */
  async #load(run) {
    const zoom = this.metrics.get(run.id)?.thinned > 1 ? this.#zoomQuery() : {};
    const [metrics, advisories, evaluations] = await Promise.allSettled([
      this.page.api.get(address(["runs", run.id, "metrics"], zoom)),
      this.page.api.get(address(["runs", run.id, "advisories"])),
      loadEvaluations(this.page.api, run.id),
    ]);
    if (metrics.status === "fulfilled") this.metrics.set(run.id, metrics.value);
    this.found.set(run.id, advisories.status === "fulfilled" ? advisories.value : { advisories: [], judged: false });
    if (evaluations.status === "fulfilled") this.evaluations.set(run.id, evaluations.value);
    this.problem = metrics.status === "rejected" ? metrics.reason : null;
    this.#drawAdvisories();
    this.#drawEvaluations();
  }

  /** The zoom for the server, which then thins less. */
  #zoomQuery() {
    const { from, to } = this.query ?? {};
    return from && to && !this.page.api.isExport ? { from: Math.floor(Number(from)), to: Math.ceil(Number(to)) } : {};
  }

  /** @param {string} more */
  #makeGrid(more) {
    this.grid?.destroy();
    this.more = more;
    const own = more ? more.split(",").map(chartOf) : [];
    this.grid = new ChartGrid([...own, ...CHARTS], {
      onOpen: (run, step) => this.page.go(link("step", [run, step])),
      onZoom: (zoom) => this.#zoom(zoom),
    });
    fill(this.chartPlace, this.grid.element);
  }

  /** @param {[number, number] | null} zoom */
  #zoom(zoom) {
    this.query = { ...this.query, from: zoom ? String(zoom[0]) : "", to: zoom ? String(zoom[1]) : "" };
    this.page.replace(link("overview", [], this.query));
    this.#applyZoom();
    this.#drawTools();
    const isThin = [...this.metrics.values()].some((metrics) => metrics.thinned > 1) || this.isZoomed;
    if (isThin && !this.page.api.isExport) {
      this.isZoomed = zoom !== null;
      void Promise.all(this.page.runs.map((run) => this.#load(run))).then(() => this.#drawCharts());
    }
  }

  #applyZoom() {
    const from = Number(this.query?.from);
    const to = Number(this.query?.to);
    this.grid?.setZoom(this.query?.from && to > from ? [from, to] : null);
  }

  get hidden() {
    return new Set((this.query?.off ?? "").split(",").filter(Boolean));
  }

  /** Draw what has arrived, once a frame. */
  #drawSoon() {
    if (this.frame || !this.page.runs.some((run) => this.#hasFigures(run.id))) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.#drawRuns();
      this.#drawCharts();
    });
  }

  /** @param {string} run */
  #hasFigures(run) {
    const metrics = this.metrics.get(run);
    return Boolean(metrics && (metrics.step.length || this.evaluations.get(run)?.evaluations.length));
  }

  #drawCharts() {
    if (this.isGone || !this.grid) return;
    const tables = this.page.runs.flatMap((run, index) => {
      if (!this.#hasFigures(run.id) || this.hidden.has(run.id)) return [];
      return [runTable(run, index, this.metrics.get(run.id), this.evaluations.get(run.id)?.evaluations)];
    });
    const drawn = tables.slice(0, MOST_DRAWN);
    const bounds = chartBounds(drawn.flatMap(({ id }) => this.found.get(id)?.advisories ?? []));
    const missing = this.grid.setTables(drawn, bounds);
    this.#drawTools(drawn);
    if (tables.length) {
      const more =
        tables.length > MOST_DRAWN
          ? `The first ${MOST_DRAWN} of the ${tables.length} runs are drawn: hide some to see others. `
          : "";
      const none = missing.length ? `No data for: ${missing.map((title) => title.toLowerCase()).join(", ")}.` : "";
      setText(this.note, more + none);
      return;
    }
    const isAllHidden = this.page.runs.every((run) => this.hidden.has(run.id));
    fill(
      this.note,
      this.problem
        ? errorState(this.problem, () => this.page.again())
        : isAllHidden
          ? emptyState("All runs are hidden", "Show one with its mark in the list.")
          : emptyState(
              "No figures yet",
              "A training run writes them after each step; they then appear here by themselves.",
              this.#episodesLine(),
            ),
    );
  }

  #episodesLine() {
    const run = this.page.currentRun;
    return run?.episodes ? h("a", { href: link("steps", [run.id]) }, "See its episodes") : null;
  }

  /** @param {import("./charts.js").RunTable[]} [tables] */
  #drawTools(tables = this.tables ?? []) {
    this.tables = tables;
    if (!tables.length) return void fill(this.tools);
    const names = [...new Set(tables.flatMap((table) => table.names))].sort();
    const key = `${names.join()}|${JSON.stringify(this.query)}|${tables.map((table) => `${table.id}${table.step.at(-1)}`).join()}`;
    if (key === this.toolsKey || this.tools.contains(document.activeElement)) return;
    this.toolsKey = key;
    const select = h(
      "select",
      { "aria-label": "Add a chart" },
      h("option", { value: "" }, "+ any figure"),
      names.map((name) => h("option", { value: name }, name)),
    );
    select.addEventListener("change", () => {
      const more = [...new Set([...(this.more ? this.more.split(",") : []), select.value])].filter(Boolean).join(",");
      select.blur();
      this.page.go(link("overview", [], { ...this.query, more }));
    });
    const zoomed = this.query?.from
      ? h(
          "button",
          { type: "button", on: { click: () => this.#zoom(null) } },
          `steps ${figure(this.query.from && Math.ceil(Number(this.query.from)))}\u2013${figure(Math.floor(Number(this.query.to)))} \u00d7`,
        )
      : null;
    const less = this.more
      ? h("a", { href: link("overview", [], { ...this.query, more: "" }) }, "without the added charts")
      : null;
    fill(
      this.tools,
      h("h2", {}, "Figures"),
      h("span", { class: "muted" }, "drag to zoom \u00b7 double click for everything \u00b7 click opens the step"),
      zoomed,
      h("span", { class: "spacer" }),
      less,
      select,
    );
  }

  #drawRuns() {
    if (this.isGone) return;
    const now = Date.now() / 1000;
    const focused = this.runList.contains(document.activeElement)
      ? document.activeElement?.getAttribute("aria-label")
      : null;
    const rows = this.page.runs.slice(0, 60).map((run, index) => this.#runRow(run, index, now));
    const left = this.page.runs.length - rows.length;
    const compare = this.page.runs.length > 1 && this.page.runs.length <= 12 ? this.#differences() : null;
    fill(
      this.runList,
      h(
        "div",
        { class: "run-row run-head", "aria-hidden": "true" },
        h("span", {}),
        h("span", {}, "run"),
        h("span", {}, "state"),
        h("span", { class: "number" }, "steps"),
        h("span", { class: "number", title: "one for each episode, or for each branch of an agent's" }, "trajectories"),
        h("span", { class: "number" }, "reward"),
        h("span", { class: "number" }, "time"),
        h("span", {}, "newest line"),
      ),
      rows,
      left > 0 ? h("p", { class: "muted" }, `${counted(left, "further run")}: open fewer to see them.`) : null,
      compare,
    );
    if (focused)
      /** @type {HTMLElement | undefined} */ (
        [...this.runList.querySelectorAll("button")].find((each) => each.getAttribute("aria-label") === focused)
      )?.focus();
  }

  /** @param {any} run @param {number} index @param {number} now */
  #runRow(run, index, now) {
    const isOff = this.hidden.has(run.id);
    const mark = h("button", {
      type: "button",
      class: `run-mark${isOff ? " off" : ""}`,
      "aria-pressed": !isOff,
      "aria-label": `Show ${run.name} in the charts`,
      title: isOff ? "Show it in the charts" : "Hide it in the charts",
      style: { "--run": runColour(index, isDark()) },
      on: { click: () => this.#toggle(run.id) },
    });
    const rewards = this.metrics.get(run.id)?.values.reward;
    const problem = run.error ?? run.warnings[0];
    return h(
      "div",
      { class: "run-row" },
      mark,
      h("a", { href: link("steps", [run.id]), title: run.path }, foreign(run.name), h("small", {}, run.kind)),
      badge(run.state, STATE_TONES[run.state], STATE_HINTS[run.state]),
      h("span", { class: "number" }, run.kind === "training" || run.steps ? whole(run.steps) : "\u2013"),
      h("span", { class: "number" }, whole(run.episodes)),
      h("span", { class: "number" }, figure(rewards?.findLast((/** @type {any} */ value) => value !== null) ?? null)),
      h(
        "span",
        { class: "number" },
        run.started && run.last ? duration(Math.max(0, run.last - run.started)) : "\u2013",
      ),
      h("span", { class: "muted" }, run.last ? timeText(run.last, ago(run.last, now)) : "\u2013"),
      problem ? h("p", { class: run.error ? "run-error" : "run-warning" }, foreign(problem)) : null,
    );
  }

  /** @param {string} id */
  #toggle(id) {
    const off = this.hidden;
    if (!off.delete(id)) off.add(id);
    this.query = { ...this.query, off: [...off].join(",") };
    this.page.replace(link("overview", [], this.query));
    this.#drawRuns();
    this.#drawCharts();
  }

  #differences() {
    this.comparison ??= settingsThatDiffer(this.page.runs, (run) => this.page.api.get(address(["runs", run.id])));
    return this.comparison;
  }

  #drawEvaluations() {
    if (this.isGone) return;
    this.evaluationTable.show(
      this.page.runs.flatMap((run) => {
        const found = this.evaluations.get(run.id);
        return found ? [{ run, ...found }] : [];
      }),
    );
  }

  #drawAdvisories() {
    if (this.isGone) return;
    const found = this.page.runs.filter((run) => this.found.has(run.id));
    this.advisories.show(
      found.map((run) => ({ run, answer: this.found.get(run.id) })),
      !this.isFirst,
    );
  }
}
