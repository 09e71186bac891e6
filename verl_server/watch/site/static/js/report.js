/**
 * The view Report of an exported page: the report that the demo or `rollout --agent` wrote into the document.
 *
 * `main` opens it first when the document has the element `#report`.
 */

import { emptyState, h } from "./dom.js";

/** @param {import("./main.js").Page} page @returns {import("./main.js").View} */
export function createReport(page) {
  const element = h("div", { class: "report" });
  if (page.report) {
    page.report.hidden = false;
    element.append(page.report);
  } else {
    element.append(emptyState("No report", "Only exported pages of the demo and of agents' runs have one."));
  }
  return { element, update() {} };
}
