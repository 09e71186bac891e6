/**
 * The view Report of an exported page: the report that the demo or `rollout --agent` wrote into the document.
 *
 * `main` opens it first when the document has the element `#report`. The report lies in a shadow root, so that its
 * styles and those of the page leave each other alone.
 */

import { emptyState, h } from "./dom.js";

/** @param {import("./main.js").Page} page @returns {import("./main.js").View} */
export function createReport(page) {
  if (!page.report) {
    const empty = emptyState("No report", "Only exported pages of the demo and of agents' runs have one.");
    return { element: h("div", { class: "page" }, empty), update() {} };
  }
  const element = h("div", { class: "report" });
  element.attachShadow({ mode: "open" }).append(page.report);
  page.report.hidden = false;
  return { element, update() {} };
}
