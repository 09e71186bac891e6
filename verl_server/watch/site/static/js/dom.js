/**
 * Elements of the page. Text gets into the document through `textContent` alone, so that no text can become markup.
 *
 * Every view builds its elements with `h`. Text that a policy, an environment or a file wrote goes through `foreign`,
 * which also keeps its direction of writing from changing the text around it.
 */

import { moment } from "./format.js";

/** @typedef {Node | string | number | null | undefined | false} Child */

/**
 * Make an element.
 * @param {string} tag
 * @param {Record<string, any>} [props] `class`; `on`: listeners by event; `style`: properties; `data`: data attributes;
 *   other entries are attributes: true is an attribute without a value, null and false leave it out. In `aria-` ones,
 *   booleans are words.
 * @param {...(Child | Child[])} children Strings and numbers become text.
 * @returns {any} The element.
 */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined) continue;
    if (name.startsWith("aria-")) element.setAttribute(name, String(value));
    else if (value === false) continue;
    else if (name === "class") element.className = value;
    else if (name === "on")
      for (const [kind, listener] of Object.entries(value)) element.addEventListener(kind, listener);
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else if (name === "data") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

/**
 * @param {Element} element
 * @param {(Child | Child[])[]} children
 */
export function append(element, children) {
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/**
 * Replace what is in an element.
 * @param {Element} element
 * @param {...(Child | Child[])} children
 */
export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

/**
 * Set the text of an element, and leave the document alone if it has it already.
 * @param {Element} element
 * @param {string} text
 */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Return a text that the page did not write, apart from the text around it.
 * @param {unknown} text
 * @param {string} [className]
 */
export function foreign(text, className = "") {
  return h("bdi", { class: className || null }, String(text ?? ""));
}

/**
 * Return a notice for a place without content: what would be here, and what to do.
 * @param {string} title
 * @param {...Child} lines
 */
export function emptyState(title, ...lines) {
  return h(
    "div",
    { class: "empty" },
    h("p", { class: "empty-title" }, title),
    ...lines.map((line) => h("p", {}, line)),
  );
}

/** Return a notice that content is on its way. It appears after a moment, so that quick answers do not flicker. */
export function loadingState(text = "Loading") {
  return h("div", { class: "loading", role: "status" }, h("span", { class: "spinner", "aria-hidden": "true" }), text);
}

/**
 * Return a notice about an error, with its remedy and a button that tries again.
 * @param {any} error
 * @param {(() => void) | null} [again]
 */
export function errorState(error, again = null) {
  const button = again && h("button", { type: "button", on: { click: again } }, "Try again");
  return h(
    "div",
    { class: "error", role: "alert" },
    h("p", { class: "error-title" }, foreign(error?.message ?? String(error))),
    error?.remedy ? h("p", {}, foreign(error.remedy)) : null,
    button,
  );
}

/**
 * Return a word with a colour for its meaning.
 * @param {string} text
 * @param {string} [tone] good, warn, bad, info or "".
 * @param {string | null} [title]
 */
export function badge(text, tone = "", title = null) {
  return h("span", { class: `badge ${tone}`, title }, foreign(text));
}

/**
 * Return a time with the full date in its title.
 * @param {number | null} seconds Seconds since 1970.
 * @param {string} text
 */
export function timeText(seconds, text) {
  return h("time", { title: moment(seconds) }, text);
}

/** @returns {boolean} True if the reader's system is dark. */
export function isDark() {
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

/**
 * Return the value of a custom property of the style sheet, for canvases.
 * @param {string} name Such as "--ink".
 */
export function styleValue(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/**
 * Give a canvas the size of its box and return its context, scaled to CSS pixels and cleared.
 * @param {HTMLCanvasElement} canvas
 * @param {number} width
 * @param {number} height
 * @returns {CanvasRenderingContext2D}
 */
export function canvasContext(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  const size = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== size[0] || canvas.height !== size[1]) {
    [canvas.width, canvas.height] = size;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
