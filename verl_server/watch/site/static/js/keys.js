/**
 * `KeyReader`: the keys of the page. `help` lists the same ones.
 *
 * Views see a key first, and use it or leave it. Keys in form fields belong to the fields; a check box has no use for
 * letters.
 */

import { link } from "./places.js";

const LETTERS_PAUSE = 1200;

export class KeyReader {
  /** @param {import("./main.js").Page} page */
  constructor(page) {
    this.page = page;
    this.isGoing = false;
    this.timer = 0;
  }

  start() {
    document.addEventListener("keydown", (event) => this.#read(event));
  }

  /** @param {KeyboardEvent} event */
  #read(event) {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || this.page.help.open) return;
    const target = /** @type {HTMLElement} */ (event.target);
    if (target.closest?.("input:not([type=checkbox]), select, textarea")) {
      if (event.key === "Escape") target.blur();
      return;
    }
    if (this.#use(event.key)) event.preventDefault();
  }

  /** @param {string} key @returns {boolean} */
  #use(key) {
    if (this.isGoing) {
      this.isGoing = false;
      return this.#goTo(key);
    }
    if (key === "g") {
      this.isGoing = true;
      clearTimeout(this.timer);
      this.timer = window.setTimeout(() => (this.isGoing = false), LETTERS_PAUSE);
      return true;
    }
    if (key === "?") {
      this.page.help.showModal();
      return true;
    }
    if (this.page.view?.key?.(key)) return true;
    if (key === "/") return this.#search();
    if (key === "Escape") {
      history.back();
      return true;
    }
    return false;
  }

  /** @param {string} key */
  #goTo(key) {
    const run = this.page.currentRun;
    const parts = run ? [run.id] : [];
    const places = /** @type {Record<string, string>} */ ({
      o: link("overview"),
      w: link("waits", parts),
      s: link("steps", parts),
      f: link("find", parts),
    });
    if (key === "r" && this.page.report) places.r = link("report");
    if (!(key in places)) return false;
    this.page.go(places[key]);
    return true;
  }

  /** Go into the search field of the view, or of the view that has one. */
  #search() {
    if (this.#enterField()) return true;
    addEventListener("hashchange", () => this.#enterField(), { once: true }); // the page has made the view by then
    this.page.go(link("find", this.page.currentRun ? [this.page.currentRun.id] : []));
    return true;
  }

  /** @returns {boolean} False if the view has no search field. */
  #enterField() {
    const field = /** @type {HTMLInputElement | null} */ (this.page.main.querySelector("input[type=search]"));
    field?.focus();
    field?.select();
    return field !== null;
  }
}
