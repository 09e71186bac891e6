/**
 * The view Steps: the steps of a run as a table, newest first. `main` opens it for `#/steps/RUN`.
 */

import { emptyState, fill, foreign, h, loadingState } from "./dom.js";
import { counted, evaluatedStep, figure, percent, toNumber, whole } from "./format.js";
import { columnTitles, viewFrame } from "./heads.js";
import { WindowedList } from "./list.js";
import { address, link } from "./places.js";

const RELOAD_PAUSE = 1000;

/** @param {import("./main.js").Page} page @returns {import("./main.js").View} */
export function createSteps(page) {
  return new Steps(page);
}

class Steps {
  /** @param {import("./main.js").Page} page */
  constructor(page) {
    this.page = page;
    ({ head: this.head, body: this.body, element: this.element } = viewFrame());
    this.list = new WindowedList({
      label: "Steps",
      guess: 34,
      render: (row) => this.#row(row),
      onSelect: (index) => this.page.say(`step ${this.rows[index].step}`),
    });
    /** @type {any[]} */
    this.rows = [];
    this.timer = 0;
    this.run = "";
  }

  destroy() {
    clearTimeout(this.timer);
    this.list.destroy();
    this.isGone = true;
  }

  /** @param {import("./places.js").Place} place */
  async update(place) {
    this.run = place.parts[0] ?? this.page.currentRun?.id ?? "";
    if (!this.run) return void fill(this.body, emptyState("No runs"));
    await this.#load();
  }

  async #load() {
    /** @type {any[]} */
    const rows = [];
    let after = null;
    do {
      const answer = await this.page.api.get(address(["runs", this.run, "steps"], { after }));
      rows.push(...answer.steps);
      after = answer.next;
    } while (after !== null && rows.length < 200000);
    if (this.isGone) return;
    this.#show(rows);
  }

  /** @param {any[]} rows */
  #show(rows) {
    const numbered = rows.filter((row) => typeof row.step === "number");
    const named = rows.filter((row) => typeof row.step !== "number" && evaluatedStep(row.step) === null);
    const evaluations = rows.filter((row) => evaluatedStep(row.step) !== null);
    this.rows = [...named, ...[...numbered, ...evaluations].sort((a, b) => stepPlace(b) - stepPlace(a))];
    const rewards = numbered
      .map((row) => toNumber(row.reward))
      .filter((reward) => reward !== null && Number.isFinite(reward));
    this.range = /** @type {number[]} */ (rewards).reduce(
      ([low, high], reward) => [Math.min(low, reward), Math.max(high, reward)],
      [Infinity, -Infinity],
    );
    const run = this.page.run(this.run);
    fill(
      this.head,
      h("h1", {}, foreign(run?.name ?? this.run)),
      h(
        "span",
        { class: "muted" },
        [
          numbered.length ? counted(numbered.length, "step") : "",
          counted(run?.episodes ?? 0, "trajectory", "trajectories"),
        ]
          .filter(Boolean)
          .join(" \u00b7 "),
      ),
      run?.error ? h("p", { class: "run-error" }, foreign(run.error)) : null,
    );
    if (!this.rows.length) {
      const isIndexing = run && run.progress.bytes < run.progress.total;
      return void fill(
        this.body,
        isIndexing
          ? loadingState("The episodes are being indexed")
          : emptyState("No episodes yet", "They appear here when the first step has recorded them."),
      );
    }
    if (!this.body.contains(this.list.element)) {
      const titles = ["step", "mean reward", "", "groups", "without spread", "episodes", "failed", "tokens"];
      const columns = columnTitles("step-line", titles, (index) => index !== 2);
      fill(this.body, columns, this.list.element);
    }
    this.list.setItems(this.rows);
  }

  /** @param {any} row */
  #row(row) {
    const reward = toNumber(row.reward);
    const [low, high] = this.range ?? [0, 1];
    const share = reward === null || !Number.isFinite(reward) ? 0 : high > low ? (reward - low) / (high - low) : 0.5;
    const bar = h(
      "span",
      { class: "bar", "aria-hidden": "true" },
      h("i", { style: { width: `${Math.round(100 * share)}%` } }),
    );
    const isTrained = evaluatedStep(row.step) === null;
    const recorded = row.played !== null && row.played > row.episodes ? ` of ${whole(row.played)}` : "";
    return h(
      "a",
      { class: "step-line", href: link("step", [this.run, row.step]) },
      h("span", { class: "number" }, stepTitle(row)),
      h("span", { class: "number reward" }, figure(row.reward)),
      bar,
      h("span", { class: "number" }, whole(row.groups)),
      h(
        "span",
        { class: `number${row.groups && row.flat / row.groups > 0.5 ? " warn-text" : ""}` },
        row.groups && isTrained ? `${whole(row.flat)} (${percent(row.flat / row.groups)})` : "\u2013",
      ),
      h("span", { class: "number" }, whole(row.episodes) + recorded),
      h("span", { class: `number${row.failed ? " bad-text" : " muted"}` }, whole(row.failed)),
      h("span", { class: "number" }, figure(row.tokens)),
    );
  }

  /** @param {any} event */
  grew(event) {
    if (event.run !== this.run || this.timer) return;
    this.timer = window.setTimeout(() => {
      this.timer = 0;
      if (!this.isGone) void this.#load().catch(() => {});
    }, RELOAD_PAUSE);
  }

  /** @param {string} key */
  key(key) {
    if (this.list.key(key)) return true;
    if (
      key === "Enter" &&
      this.list.selected >= 0 &&
      !this.element.contains(document.activeElement?.closest("a") ?? null)
    ) {
      this.page.go(link("step", [this.run, this.rows[this.list.selected].step]));
    } else return false;
    return true;
  }
}

/** @param {any} row */
function stepTitle({ step }) {
  const evaluated = evaluatedStep(step);
  if (evaluated !== null) return `held-out ${evaluated}`;
  return step === "-" ? "all" : String(step);
}

/** The place of a step over time. An evaluation at a step lies before it. @param {any} row */
function stepPlace({ step }) {
  const evaluated = evaluatedStep(step);
  return evaluated === null ? step : evaluated - 0.5;
}
