/**
 * The view Step: the groups of a step, those first whose rewards differ most, with filters.
 *
 * `main` opens it for `#/step/RUN/STEP`. The query has the filters and the order.
 */

import { compareForm } from "./compareform.js";
import { emptyState, errorState, fill, foreign, h } from "./dom.js";
import { evaluationFacts, loadEvaluations } from "./evaluations.js";
import { capital, counted, evaluatedStep, figure, fixed, placeName, whole } from "./format.js";
import { filterForm, filtersOf, fits, sortedGroups } from "./filters.js";
import { arrow, columnTitles, fact, viewFrame } from "./heads.js";
import { WindowedList } from "./list.js";
import { address, link } from "./places.js";
import { endsText, episodeLine, rewardRange, rewardStrip } from "./rows.js";

const ORDERS = [
  ["", "spread of the rewards"],
  ["flat", "least spread"],
  ["mean", "mean reward"],
  ["tokens", "length"],
  ["failed", "failures"],
  ["number", "number"],
];
const GROW_PAUSE = 1500;

/** @param {import("./main.js").Page} page @returns {import("./main.js").View} */
export function createStep(page) {
  return new Step(page);
}

class Step {
  /** @param {import("./main.js").Page} page */
  constructor(page) {
    this.page = page;
    this.tools = h("div", {});
    ({ head: this.head, body: this.body, element: this.element } = viewFrame(this.tools));
    this.list = new WindowedList({
      label: "Groups",
      guess: 34,
      className: "groups",
      render: (item) => (item.row ? episodeLine(this.run, item.row, { isChild: true }) : this.#group(item.group)),
      onEnd: () => void this.#more(),
    });
    /** @type {any[]} */
    this.groups = [];
    /** @type {Set<string>} */
    this.open = new Set();
    /** @type {any[]} */
    this.items = [];
    this.run = "";
    this.step = "";
    this.timer = 0;
    /** @type {string | null} */
    this.next = null;
    this.isLoading = false;
  }

  destroy() {
    clearTimeout(this.timer);
    this.list.destroy();
    this.isGone = true;
  }

  /** @param {import("./places.js").Place} place */
  async update(place) {
    const isOther = this.run !== place.parts[0] || this.step !== place.parts[1];
    [this.run, this.step] = place.parts;
    this.query = place.query;
    if (isOther) {
      this.open.clear();
      this.list.element.scrollTop = 0;
      this.list.selected = -1;
    }
    if (place.query.group) this.open.add(place.query.group);
    this.#drawTools();
    await this.#load();
  }

  #drawTools() {
    const form = filterForm(this.query ?? {}, (filters) => this.page.go(link("step", [this.run, this.step], filters)), {
      orders: ORDERS,
    });
    fill(this.tools, form);
  }

  async #load() {
    const { api } = this.page;
    const filters = filtersOf(this.query ?? {});
    const sort = this.query?.sort ?? "";
    const url = address(["runs", this.run, "steps", this.step], { ...filters, sort });
    const asked = (this.asked = {});
    let answer;
    if (api.has(url)) {
      answer = await api.get(url);
    } else {
      const whole = await api.get(address(["runs", this.run, "steps", this.step]));
      const found = whole.groups.filter((/** @type {any} */ group) =>
        group.episodes.some((/** @type {any} */ row) => fits(row, filters)),
      );
      answer = { ...whole, groups: sortedGroups(found, sort) };
    }
    const evaluation = await this.#evaluation();
    if (this.isGone || asked !== this.asked) return;
    this.evaluation = evaluation;
    this.groups = answer.groups;
    this.next = answer.next;
    this.answer = answer;
    this.range = rewardRange(this.groups);
    this.#drawHead(answer);
    this.#drawList();
  }

  /** What is recorded of the evaluation whose episodes these are; null for a step. */
  async #evaluation() {
    const evaluated = evaluatedStep(this.step);
    if (evaluated === null) return null;
    const { evaluations } = await loadEvaluations(this.page.api, this.run);
    return evaluations.findLast(({ step }) => step === evaluated) ?? null;
  }

  async #more() {
    if (this.next === null || this.isLoading) return;
    this.isLoading = true;
    const asked = this.asked;
    try {
      const query = { ...filtersOf(this.query ?? {}), sort: this.query?.sort, after: this.next };
      const answer = await this.page.api.get(address(["runs", this.run, "steps", this.step], query));
      if (this.isGone || asked !== this.asked) return;
      this.groups = [...this.groups, ...answer.groups];
      this.next = answer.next;
      this.#drawList();
    } catch (error) {
      this.next = null;
      this.body.append(errorState(error));
    } finally {
      this.isLoading = false;
    }
  }

  /** @param {any} answer */
  #drawHead(answer) {
    const { step, previous_step: previous, next_step: next } = answer;
    const to = (/** @type {any} */ step) =>
      step === null || step === undefined ? null : link("step", [this.run, step], this.#kept());
    const recorded = step.played !== null && step.played > step.episodes ? ` of ${whole(step.played)} recorded` : "";
    const isEvaluation = evaluatedStep(step.step) !== null;
    const isNamed = typeof step.step !== "number" && step.step !== "-" && !isEvaluation;
    const title = isNamed ? `Groups: ${step.step}` : capital(placeName(step.step));
    fill(
      this.head,
      arrow(to(previous), "\u2039", isEvaluation ? "Previous evaluation (p)" : "Previous step (p)"),
      h("h1", {}, title),
      arrow(to(next), "\u203a", isEvaluation ? "Next evaluation (n)" : "Next step (n)"),
      h(
        "span",
        { class: "facts" },
        fact("reward", figure(step.reward)),
        fact("groups", whole(step.groups)),
        isEvaluation ? null : fact("without spread", whole(step.flat)),
        fact("episodes", whole(step.episodes) + recorded),
        fact("failed", whole(step.failed), step.failed ? "bad-text" : ""),
        fact("tokens", figure(step.tokens)),
        this.evaluation ? evaluationFacts(this.evaluation) : null,
      ),
      h("span", { class: "spacer" }),
      compareForm(this.page, this.run, this.step, previous),
    );
  }

  /** The part of the query that goes on to another step. */
  #kept() {
    const { group: _, from: __, to: ___, ...rest } = this.query ?? {};
    return rest;
  }

  #drawList() {
    const before = new Map(this.items.map((item) => [item.key, item]));
    const filters = filtersOf(this.query ?? {});
    const isFiltered = Object.keys(filters).length > 0;
    this.items = this.groups.flatMap((group) => {
      const key = `${group.group} ${this.open.has(group.group)}`;
      const old = before.get(key);
      const head = old?.group === group ? old : { key, group };
      if (!this.open.has(group.group)) return [head];
      const rows = isFiltered ? group.episodes.filter((/** @type {any} */ row) => fits(row, filters)) : group.episodes;
      return [head, ...rows.map((/** @type {any} */ row) => before.get(row.row) ?? { key: row.row, row })];
    });
    if (!this.items.length) {
      const isEmpty = !isFiltered;
      return void fill(
        this.body,
        emptyState(
          isEmpty ? "No episodes are recorded for this step" : "No episode passes the filters",
          isEmpty
            ? "Their files may have been removed (--keep-trajectories), or the index is not there yet."
            : "Widen them, or reset them.",
        ),
      );
    }
    if (!this.body.contains(this.list.element)) fill(this.body, this.#columns(), this.list.element);
    this.list.setItems(this.items);
  }

  #columns() {
    const titles = ["", "group", "rewards", "mean", "spread", "episodes", "tokens", "ends"];
    return columnTitles("group-line", titles, (index) => index > 2 && index < 7);
  }

  /** @param {any} group */
  #group(group) {
    const isOpen = this.open.has(group.group);
    const seed = group.episode_id ?? `seed ${group.seed}`;
    const line = h(
      "button",
      { type: "button", class: "group-line", "aria-expanded": isOpen, on: { click: () => this.#toggle(group) } },
      h("span", { class: "fold", "aria-hidden": "true" }, isOpen ? "\u25be" : "\u25b8"),
      h(
        "span",
        { class: "name", title: `group ${group.number}, ${seed}` },
        h("b", {}, group.number),
        " ",
        foreign(seed, "muted"),
      ),
      rewardStrip(group, this.range ?? [0, 1], (row) => this.page.go(link("episode", [this.run, row]))),
      h("span", { class: "number" }, figure(group.mean)),
      h(
        "span",
        { class: `number${group.spread === 0 ? " muted" : ""}` },
        group.spread === null ? "\u2013" : fixed(group.spread, 3),
      ),
      h(
        "span",
        { class: "number" },
        group.scored < group.count ? `${group.scored}/${group.count}` : whole(group.count),
      ),
      h("span", { class: "number" }, whole(group.tokens)),
      h(
        "span",
        { class: "rest" },
        endsText(group.ends),
        group.left_out ? ` \u00b7 ${counted(group.left_out, "episode")} more` : "",
      ),
    );
    return line;
  }

  /** @param {any} group */
  #toggle(group) {
    if (!this.open.delete(group.group)) this.open.add(group.group);
    const hadFocus = this.list.element.contains(document.activeElement);
    this.#drawList();
    const index = this.items.findIndex((item) => item.group === group);
    if (hadFocus)
      /** @type {HTMLElement | undefined} */ (this.list.rowOf(index)?.firstElementChild)?.focus({
        preventScroll: true,
      });
  }

  /** @param {any} event */
  grew(event) {
    if (event.run !== this.run || this.timer || this.page.api.isExport) return;
    if (this.groups.length && String(event.last_step) !== this.step && this.answer?.next_step !== null) return;
    this.timer = window.setTimeout(() => {
      this.timer = 0;
      if (!this.isGone) void this.#load().catch(() => {});
    }, GROW_PAUSE);
  }

  /** @param {string} key */
  key(key) {
    const selected = this.items[this.list.selected];
    if (this.list.key(key)) return true;
    if (key === "n" || key === "p") {
      const to = key === "n" ? this.answer?.next_step : this.answer?.previous_step;
      if (to !== null && to !== undefined) this.page.go(link("step", [this.run, to], this.#kept()));
    } else if (key === "Enter" && selected && !document.activeElement?.closest(".row, button, a, form")) {
      if (selected.row) this.page.go(link("episode", [this.run, selected.row.row]));
      else this.#toggle(selected.group);
    } else return false;
    return true;
  }
}
