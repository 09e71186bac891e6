/**
 * The page: its head, the choice of the view by the place, the runs, the live feed, the keys.
 *
 * It is the one module with an effect when it is loaded. Each view is a function that returns a `View`.
 */

import { Api, embeddedAnswers } from "./api.js";
import { LiveFeed } from "./live.js";
import { append, errorState, fill, h, loadingState, setText } from "./dom.js";
import { bytes, moment, percent } from "./format.js";
import { helpDialog } from "./help.js";
import { KeyReader } from "./keys.js";
import { address, link, parsePlace, takeKey } from "./places.js";
import { createOverview } from "./overview.js";
import { createWaits } from "./waits.js";
import { createSteps } from "./steps.js";
import { createStep } from "./step.js";
import { createCompare } from "./compare.js";
import { createFind } from "./find.js";
import { createEpisode } from "./episode.js";
import { createReport } from "./report.js";
import { createSettings } from "./runsettings.js";

/** @typedef {import("./places.js").Place} Place */
/**
 * @typedef {object} View
 * @property {HTMLElement} element
 * @property {(place: Place) => Promise<void> | void} update Shows a place of this view.
 * @property {(event: any) => void} [grew] A run has grown: `Live` in answers/runs.py.
 * @property {(key: string) => boolean} [key] Uses a key and returns true, or leaves it.
 * @property {() => void} [destroy]
 */

/** @type {Record<string, (page: Page) => View>} */
const VIEWS = {
  overview: createOverview,
  waits: createWaits,
  steps: createSteps,
  step: createStep,
  compare: createCompare,
  find: createFind,
  episode: createEpisode,
  report: createReport,
  settings: createSettings,
};
const TABS = [
  ["report", "Report"],
  ["overview", "Overview"],
  ["waits", "Who waits"],
  ["steps", "Steps"],
  ["find", "Find"],
  ["settings", "Settings"],
];
/** @type {Record<string, string>} View -> tab that is marked for it. */
const TAB_OF = { step: "steps", compare: "steps", episode: "steps" };

/** What the views know of the page. */
export class Page {
  constructor() {
    this.api = new Api(embeddedAnswers(), () => this.askKey());
    /** @type {any[]} The entries of /api/runs. */
    this.runs = [];
    this.version = "";
    this.main = /** @type {HTMLElement} */ (document.getElementById("main"));
    this.report = document.getElementById("report");
    /** @type {View | null} */
    this.view = null;
    this.viewName = "";
    /** @type {Place} */
    this.place = parsePlace(location.hash);
    this.liveMark = h("span", { class: "live", role: "status" });
    this.progress = h("span", { class: "progress-text" });
    this.nav = h("nav", { "aria-label": "Views" });
    this.runChoice = h("span", { class: "run-choice" });
    this.help = helpDialog();
  }

  async start() {
    const { key, rest } = takeKey(location.hash);
    if (key !== null) {
      history.replaceState(null, "", rest);
      this.api.setKey(key);
      this.place = parsePlace(rest);
    }
    this.#makeHead();
    fill(this.main, loadingState("Loading the runs"));
    addEventListener("hashchange", () => void this.show());
    new KeyReader(this).start();
    if (!this.api.isExport)
      new LiveFeed(
        this.api,
        (event) => this.#grew(event),
        (state) => this.#liveState(state),
      ).start();
    else this.liveMark.className = "live export";
    await this.loadRuns();
    if (this.api.isExport && this.report && !location.hash) history.replaceState(null, "", link("report"));
    await this.show();
  }

  async loadRuns() {
    try {
      const answer = await this.api.get(address(["runs"]));
      this.runs = answer.runs;
      this.version = answer.version;
      if (answer.exported) this.#tellExport(answer);
      return true;
    } catch (error) {
      if (!this.runs.length && this.viewName === "")
        fill(
          this.main,
          errorState(error, () => location.reload()),
        );
      return false;
    }
  }

  /** Show the place of the URL. */
  async show() {
    this.place = parsePlace(location.hash);
    if (!this.runs.length && !(await this.loadRuns())) return;
    const name = this.place.view in VIEWS ? this.place.view : "overview";
    if (this.viewName !== name || !this.view) {
      this.view?.destroy?.();
      this.viewName = name;
      this.view = VIEWS[name](this);
      this.main.className = `view-${name}`;
      fill(this.main, this.view.element);
    }
    this.#drawHead();
    const { view } = this;
    try {
      await view.update(this.place);
    } catch (error) {
      if (this.view !== view) return;
      view.destroy?.();
      this.view = null; // the next place gets a new one
      const again = () => void this.show();
      fill(this.main, h("div", { class: "page" }, errorState(error, again)));
    }
  }

  /** Make the view anew. */
  again() {
    this.view?.destroy?.();
    this.view = null;
    void this.show();
  }

  /** @param {string} href Of `link`. */
  go(href) {
    if (location.hash === href) void this.show();
    else location.hash = href;
  }

  /** Change the URL to another place of the same view, without an entry in the history. @param {string} href */
  replace(href) {
    history.replaceState(history.state, "", href);
    this.place = parsePlace(location.hash);
    this.#drawHead();
  }

  /** @param {string} id */
  run(id) {
    return this.runs.find((run) => run.id === id) ?? null;
  }

  /** The place's run, or the run that one most likely wants: one that goes on, or the newest. */
  get currentRun() {
    const named = this.run(this.place.parts[0] ?? "");
    if (named) return named;
    const active = this.runs.filter((run) => run.state === "running");
    return (active.length ? active : [...this.runs]).sort((a, b) => (b.last ?? 0) - (a.last ?? 0))[0] ?? null;
  }

  /** Tell screen readers. @param {string} text */
  say(text) {
    setText(/** @type {HTMLElement} */ (document.getElementById("said")), text);
  }

  /** Show a field for the key. */
  askKey() {
    if (document.querySelector(".key-form")) return;
    const input = h("input", {
      type: "password",
      name: "key",
      autocomplete: "current-password",
      required: true,
      "aria-label": "Key",
    });
    const form = h(
      "form",
      { class: "key-form" },
      h("h2", {}, "This server wants a key"),
      h(
        "p",
        {},
        "It is in the file of --api-key-file, or the VERL_SERVER_API_KEY of the one who started `verl-server watch`.",
      ),
      h("div", { class: "key-line" }, input, h("button", { type: "submit" }, "Open")),
    );
    form.addEventListener("submit", (/** @type {Event} */ event) => {
      event.preventDefault();
      this.api.setKey(input.value);
      location.reload();
    });
    queueMicrotask(() => {
      fill(this.main, form);
      input.focus();
    });
  }

  #makeHead() {
    const button = h(
      "button",
      {
        type: "button",
        class: "quiet",
        title: "Keys (?)",
        "aria-label": "Show the keys",
        on: { click: () => this.help.showModal() },
      },
      "?",
    );
    const head = /** @type {HTMLElement} */ (document.getElementById("head"));
    const name = h("a", { class: "brand", href: link("overview") }, "verl-server ", h("b", {}, "watch"));
    append(head, [
      name,
      this.nav,
      this.runChoice,
      h("span", { class: "head-end" }, this.progress, this.liveMark, button),
    ]);
    document.body.append(this.help);
  }

  #drawHead() {
    const run = this.currentRun;
    const tab = TAB_OF[this.viewName] ?? this.viewName;
    const tabs = TABS.filter(([name]) => (name === "report" ? this.report : true));
    fill(
      this.nav,
      tabs.map(([name, title]) =>
        h(
          "a",
          {
            href: link(name, run && name !== "overview" && name !== "report" ? [run.id] : []),
            "aria-current": name === tab ? "page" : null,
          },
          title,
        ),
      ),
    );
    this.#drawRunChoice(run, tab);
    this.#drawProgress();
    document.title = `${tabs.find(([name]) => name === tab)?.[1] ?? ""} \u00b7 ${run && tab !== "overview" ? `${run.name} \u00b7 ` : ""}verl-server watch`;
  }

  /** @param {any} run @param {string} tab */
  #drawRunChoice(run, tab) {
    const isShown = tab !== "overview" && tab !== "report" && run && this.runs.length > 1;
    if (!isShown) return void fill(this.runChoice);
    const select = h(
      "select",
      { "aria-label": "Run" },
      this.runs.map((each) => h("option", { value: each.id, selected: each.id === run.id }, each.name)),
    );
    select.addEventListener("change", () => this.go(link(tab, [select.value])));
    fill(this.runChoice, select);
  }

  /** @param {any} answer */
  #tellExport(answer) {
    setText(this.liveMark, `exported ${moment(answer.exported)}`);
    this.liveMark.title = answer.notes.join("\n");
  }

  #drawProgress() {
    let known = 0;
    let total = 0;
    for (const { progress } of this.runs) {
      known += progress.bytes;
      total += progress.total;
    }
    const isBehind = total > 0 && known < total;
    setText(this.progress, isBehind ? `${percent(known / total)} of ${bytes(total)} indexed` : "");
  }

  /** @param {any} event */
  #grew(event) {
    const run = this.run(event.run);
    if (!run) return void this.loadRuns();
    for (const name of ["generation", "state", "steps", "last_step", "episodes", "progress"])
      run[name] = event[name] ?? run[name];
    run.last = Date.now() / 1000;
    this.#drawProgress();
    this.view?.grew?.(event);
  }

  /** @param {"live" | "connecting" | "paused"} state */
  #liveState(state) {
    const texts = { live: "live", connecting: "connecting\u2026", paused: "paused" };
    setText(this.liveMark, texts[state]);
    this.liveMark.className = `live ${state}`;
    if (state === "live") void this.#catchUp();
  }

  /** Tell the view about runs that grew while nobody listened. */
  async #catchUp() {
    const before = new Map(this.runs.map((run) => [run.id, run.generation]));
    if (!before.size || !(await this.loadRuns())) return;
    this.#drawHead();
    for (const run of this.runs) {
      if (before.get(run.id) !== run.generation) this.view?.grew?.({ run: run.id, ...run, id: undefined });
    }
  }
}

void new Page().start();
