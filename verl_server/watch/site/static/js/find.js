/**
 * The view Find: the episodes of a whole run that pass filters and have a text. `main` opens it for `#/find/RUN`.
 *
 * The server searches for about a second at a time. The view goes on by itself until it has some rows, then when the
 * reader asks.
 */

import { emptyState, errorState, fill, h, loadingState } from "./dom.js";
import { bytes, counted, percent, whole } from "./format.js";
import { filterForm, filtersOf, fits } from "./filters.js";
import { WindowedList } from "./list.js";
import { address, link } from "./places.js";
import { episodeLine } from "./rows.js";

const FOUND_ORDERS = [
  ["", "newest"],
  ["oldest", "oldest"],
  ["-reward", "highest reward"],
  ["reward", "lowest reward"],
  ["-tokens", "longest"],
  ["tokens", "shortest"],
  ["-seconds", "slowest"],
  ["seconds", "quickest"],
];
const ENOUGH = 40;

/** @param {import("./main.js").Page} page @returns {import("./main.js").View} */
export function createFind(page) {
  return new Find(page);
}

class Find {
  /** @param {import("./main.js").Page} page */
  constructor(page) {
    this.page = page;
    this.tools = h("div", {});
    this.status = h("div", { class: "search-status", role: "status" });
    this.body = h("div", { class: "fill" }, loadingState());
    this.element = h("div", { class: "page full" }, this.tools, this.status, this.body);
    this.list = new WindowedList({
      label: "Episodes",
      guess: 32,
      render: (item) => episodeLine(this.run, item.row, { excerpt: item.excerpt }),
      onEnd: () => {
        if (!this.query?.q && !this.page.api.isExport) void this.#go(); // an export has the first page alone
      },
    });
    this.run = "";
    /** @type {{row: any, excerpt: string}[]} */
    this.items = [];
    /** @type {string | null} */
    this.next = null;
    /** @type {AbortController | null} */
    this.search = null;
    this.isBusy = false;
  }

  destroy() {
    this.search?.abort();
    this.list.destroy();
  }

  /** @param {import("./places.js").Place} place */
  async update(place) {
    this.search?.abort();
    this.search = new AbortController();
    this.run = place.parts[0] ?? this.page.currentRun?.id ?? "";
    this.query = place.query;
    this.items = [];
    this.next = null;
    /** @type {number | null} */
    this.total = null;
    this.isBusy = false;
    const field = /** @type {HTMLInputElement | null} */ (this.tools.querySelector("input[type=search]"));
    const hadFocus = field !== null && document.activeElement === field;
    fill(
      this.tools,
      filterForm(place.query, (filters) => this.page.go(link("find", [this.run], filters)), {
        steps: true,
        search: true,
        orders: FOUND_ORDERS,
        orderName: "order",
      }),
    );
    if (hadFocus) /** @type {HTMLElement} */ (this.tools.querySelector("input[type=search]")).focus();
    this.list.element.scrollTop = 0;
    await this.#go();
  }

  /** Ask for more rows; a search goes on until it has found enough. */
  async #go() {
    if (this.isBusy || (this.items.length && this.next === null)) return;
    const { signal } = /** @type {AbortController} */ (this.search);
    this.isBusy = true;
    const goal = this.items.length + ENOUGH;
    try {
      do {
        const answer = await this.#page(signal);
        if (signal.aborted) return;
        this.items = [
          ...this.items,
          ...answer.rows.map((/** @type {any} */ row, /** @type {number} */ index) => ({
            row,
            excerpt: answer.excerpts[index] ?? "",
          })),
        ];
        this.next = answer.next;
        this.total = answer.total ?? this.total;
        this.#show(answer);
      } while (this.query?.q && this.next !== null && this.items.length < goal);
    } catch (error) {
      if (signal.aborted) return;
      fill(
        this.status,
        errorState(error, () => this.page.again()),
      );
      if (!this.items.length) fill(this.body);
    } finally {
      if (!signal.aborted) this.isBusy = false;
    }
    if (!signal.aborted && this.lastAnswer) this.#status(this.lastAnswer);
  }

  /** @param {AbortSignal} signal */
  async #page(signal) {
    const filters = filtersOf(this.query ?? {});
    const url = address(["runs", this.run, "episodes"], {
      ...filters,
      q: this.query?.q,
      order: this.query?.order,
      after: this.next,
    });
    if (this.page.api.has(url) || this.query?.q) return this.page.api.get(url, { signal });
    const whole = await this.page.api.get(address(["runs", this.run, "episodes"]), { signal });
    const rows = whole.rows.filter((/** @type {any} */ row) => fits(row, filters));
    return { ...whole, rows, total: rows.length, next: null };
  }

  /** @param {any} answer */
  #show(answer) {
    this.lastAnswer = answer;
    this.#status(answer);
    if (!this.items.length) {
      const isOver = this.next === null;
      return void fill(
        this.body,
        isOver
          ? emptyState(
              "No episode",
              this.query?.q
                ? "No text of the run has these words, as far as the filters let it through."
                : "No episode passes the filters.",
            )
          : loadingState("Searching"),
      );
    }
    if (!this.body.contains(this.list.element)) fill(this.body, this.list.element);
    this.list.setItems(this.items);
  }

  /** @param {any} answer */
  #status(answer) {
    const { searched } = answer;
    if (!searched) {
      return void fill(this.status, h("span", {}, this.#counted()));
    }
    const share = searched.total ? searched.bytes / searched.total : 1;
    const bar = h("progress", { max: 1, value: share, "aria-label": "Searched share" });
    const go =
      this.next !== null && !this.isBusy
        ? h("button", { type: "button", on: { click: () => void this.#go() } }, "Go on")
        : null;
    const stop =
      this.isBusy && this.next !== null
        ? h("button", { type: "button", on: { click: () => this.#stop() } }, "Stop")
        : null;
    fill(
      this.status,
      h("span", {}, `${whole(this.items.length)} found`),
      bar,
      h("span", { class: "muted" }, `${percent(share)} of ${bytes(searched.total)} searched`),
      go,
      stop,
    );
  }

  /** Say how many episodes are shown, and how many there are. */
  #counted() {
    const { length } = this.items;
    if (this.total === null) return counted(length, "episode") + (this.next === null ? "" : ", and more");
    if (length >= this.total) return counted(length, "episode");
    const text = `${whole(length)} of ${counted(this.total, "episode")}`;
    return this.page.api.isExport ? `${text}; this export lists these` : text;
  }

  #stop() {
    this.search?.abort();
    this.search = new AbortController();
    this.isBusy = false;
    if (this.lastAnswer) this.#status(this.lastAnswer);
  }

  /** @param {string} key */
  key(key) {
    if (this.list.key(key)) return true;
    if (key === "Enter" && this.items[this.list.selected] && !document.activeElement?.closest(".row, form")) {
      this.page.go(link("episode", [this.run, this.items[this.list.selected].row.row]));
    } else return false;
    return true;
  }
}
