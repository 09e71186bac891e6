/**
 * The view Compare: two steps of a run or of two runs, task by task, side by side.
 *
 * `main` opens it for `#/compare/RUN?a=STEP&b=STEP&with=RUN`. `with` is the run of step b, left out if it is the same.
 */

import { heldComparison } from "./comparison.js";
import { emptyState, errorState, fill, foreign, h } from "./dom.js";
import { capital, counted, figure, fixed, placeName, toNumber, whole } from "./format.js";
import { arrow, columnTitles, fact, viewFrame } from "./heads.js";
import { WindowedList } from "./list.js";
import { address, link } from "./places.js";
import { episodeLine, rewardRange, rewardStrip } from "./rows.js";

/** @param {import("./main.js").Page} page @returns {import("./main.js").View} */
export function createCompare(page) {
  return new Compare(page);
}

class Compare {
  /** @param {import("./main.js").Page} page */
  constructor(page) {
    this.page = page;
    ({ head: this.head, body: this.body, element: this.element } = viewFrame());
    this.list = new WindowedList({
      label: "Tasks",
      guess: 40,
      render: (item) => (item.rows ? this.#rows(item.rows) : this.#pair(item.pair)),
      onEnd: () => void this.#more(),
    });
    /** @type {Set<string>} */
    this.open = new Set();
    /** @type {any[]} */
    this.pairs = [];
    /** @type {any[]} */
    this.items = [];
    /** @type {string | null} */
    this.next = null;
    this.run = "";
    this.other = "";
  }

  destroy() {
    this.list.destroy();
    this.isGone = true;
  }

  /** @param {import("./places.js").Place} place */
  async update(place) {
    this.run = place.parts[0];
    this.other = place.query.with || this.run;
    this.query = { a: place.query.a, b: place.query.b, with: this.other === this.run ? "" : this.other };
    const answer = await this.#answer();
    if (this.isGone) return;
    this.pairs = answer.pairs;
    this.next = answer.next;
    this.items = []; // a pair of other steps may have the name of an earlier one
    this.range = rewardRange(this.pairs.flatMap(({ a, b }) => [a, b]));
    const runs = [this.run, this.other];
    const names = [answer.a, answer.b].map(({ step }, at) =>
      this.other === this.run ? placeName(step) : `${this.page.run(runs[at])?.name ?? runs[at]}, ${placeName(step)}`,
    );
    const side = (/** @type {any} */ step, /** @type {number} */ at) =>
      h(
        "span",
        { class: "facts" },
        h("a", { href: link("step", [runs[at], step.step]) }, foreign(this.other === this.run ? capital(names[at]) : names[at])),
        fact("reward", figure(step.reward)),
        fact("failed", whole(step.failed)),
        fact("tokens", figure(step.tokens)),
      );
    const query = { a: this.query.b, b: this.query.a, with: this.query.with && this.run };
    fill(
      this.head,
      h("h1", {}, "Compare"),
      side(answer.a, 0),
      arrow(link("compare", [this.other], query), "\u21c4", "Swap the sides"),
      side(answer.b, 1),
      h("span", { class: "muted" }, `${counted(answer.common, "task")} in common`),
    );
    if (!this.pairs.length)
      return void fill(this.body, emptyState("Nothing to compare", "Neither step has recorded episodes."));
    if (!answer.common)
      this.head.append(
        h(
          "p",
          { class: "note" },
          "No task was played in both steps: the rows below are those of one step alone. A task is the environment and its seed.",
        ),
      );
    const titles = ["", "task", `${names[0]}: rewards, mean`, "change", `${names[1]}: rewards, mean`];
    fill(this.body, columnTitles("pair-line", titles, (index) => index === 3), this.list.element);
    this.#draw();
  }

  async #answer() {
    const { api } = this.page;
    const { a, b } = /** @type {any} */ (this.query);
    if (!api.isExport) return api.get(address(["runs", this.run, "compare"], this.query));
    const run = (/** @type {string} */ id) => this.page.run(id) ?? { id, name: id };
    return heldComparison(api, [run(this.run), run(this.other)], [a, b]);
  }

  #draw() {
    const before = new Map(this.items.map((item) => [item.key, item]));
    this.items = this.pairs.flatMap((pair, index) => {
      const name = `${index} ${pair.task}`;
      const isOpen = this.open.has(name);
      const head = before.get(`${name} ${isOpen}`) ?? { key: `${name} ${isOpen}`, name, pair };
      if (!isOpen) return [head];
      const [a, b] = [pair.a?.episodes ?? [], pair.b?.episodes ?? []];
      const rows = Array.from(
        { length: Math.max(a.length, b.length) },
        (_, at) => before.get(`${name}:${at}`) ?? { key: `${name}:${at}`, rows: [a[at], b[at]] },
      );
      return [head, ...rows];
    });
    this.list.setItems(this.items);
  }

  async #more() {
    if (this.next === null) return;
    const after = this.next;
    this.next = null;
    try {
      const answer = await this.page.api.get(address(["runs", this.run, "compare"], { ...this.query, after }));
      if (this.isGone) return;
      this.pairs = [...this.pairs, ...answer.pairs];
      this.next = answer.next;
      this.#draw();
    } catch (error) {
      this.body.append(errorState(error));
    }
  }

  /** @param {any} pair */
  #pair(pair) {
    const item = this.items.find((each) => each.pair === pair);
    const isOpen = this.open.has(item?.name);
    const [a, b] = [toNumber(pair.a?.mean), toNumber(pair.b?.mean)];
    const change = a !== null && b !== null ? b - a : null;
    const side = (/** @type {any} */ group, run = this.run) =>
      group
        ? h(
            "span",
            { class: "side" },
            rewardStrip(group, this.range ?? [0, 1], (row) => this.page.go(link("episode", [run, row]))),
            h("span", { class: "number" }, figure(group.mean)),
          )
        : h("span", { class: "side muted" }, "not played");
    return h(
      "button",
      { type: "button", class: "pair-line", "aria-expanded": isOpen, on: { click: () => this.#toggle(item) } },
      h("span", { class: "fold", "aria-hidden": "true" }, isOpen ? "\u25be" : "\u25b8"),
      h("span", { class: "name" }, foreign(pair.episode_id ?? `seed ${pair.seed}`)),
      side(pair.a),
      h(
        "span",
        {
          class: `number change${change === null || Math.abs(change) < 0.005 ? " muted" : change < 0 ? " bad-text" : " good-text"}`,
        },
        change === null ? "" : `${change > 0 ? "+" : ""}${fixed(change)}`,
      ),
      side(pair.b, this.other),
    );
  }

  /** @param {any[]} rows */
  #rows(rows) {
    return h(
      "div",
      { class: "two-sides" },
      rows.map((row, at) => (row ? episodeLine(at ? this.other : this.run, row, { isChild: true }) : h("span", {}))),
    );
  }

  /** @param {any} item */
  #toggle(item) {
    if (!this.open.delete(item.name)) this.open.add(item.name);
    this.#draw();
    const index = this.items.findIndex((each) => each.name === item.name);
    /** @type {HTMLElement | undefined} */ (this.list.rowOf(index)?.firstElementChild)?.focus({ preventScroll: true });
  }

  /** @param {string} key */
  key(key) {
    if (this.list.key(key)) return true;
    if (key === "Enter" && this.items[this.list.selected]?.pair && !document.activeElement?.closest(".row, form"))
      this.#toggle(this.items[this.list.selected]);
    else return false;
    return true;
  }
}
