/**
 * What the views of steps, comparisons and episodes have at the top: their frame, facts, arrows and titles of columns.
 */

import { h, loadingState } from "./dom.js";

/**
 * Return the elements of a view that fills the window: a head, and a body that waits for the first answer.
 * @param {...HTMLElement} between What lies between them.
 */
export function viewFrame(...between) {
  const head = h("div", { class: "view-head" });
  const body = h("div", { class: "fill" }, loadingState());
  return { head, body, element: h("div", { class: "page full" }, head, between, body) };
}

/** @param {string} name @param {string} value @param {string} [tone] */
export function fact(name, value, tone = "") {
  return h("span", { class: "fact" }, h("small", {}, name), h("b", { class: tone || null }, value));
}

/**
 * Return a link to a neighbour, dimmed if there is none.
 * @param {string | null} href
 * @param {string} text
 * @param {string} title
 */
export function arrow(href, text, title) {
  return href === null
    ? h("span", { class: "arrow off", "aria-hidden": "true" }, text)
    : h("a", { class: "arrow", href, title, "aria-label": title }, text);
}

/**
 * Return the line of titles above a list.
 * @param {string} line Class of the list's lines, which has the widths of the columns.
 * @param {string[]} titles
 * @param {(index: number) => boolean} isNumber
 */
export function columnTitles(line, titles, isNumber) {
  return h(
    "div",
    { class: `${line} list-head`, "aria-hidden": "true" },
    titles.map((title, index) => h("span", { class: isNumber(index) ? "number" : "" }, title)),
  );
}
