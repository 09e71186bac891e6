/**
 * `AdvisoryList`: what is wrong with the runs, the most severe first, with the figure, the cause and the remedy.
 *
 * `overview` shows it above the charts.
 */

import { causePlaces } from "./causes.js";
import { badge, fill, foreign, h } from "./dom.js";
import { counted, figure, words } from "./format.js";

const MOST_ADVISORIES = 6;
const SEVERITIES = ["error", "warning", "notice"];

/**
 * Return the advisories of all runs: those that are still true first, then by severity, then the newest.
 * @param {{run: any, answer: any}[]} found Runs with their `Advisories` of answers/advisories.py.
 * @returns {any[]} Each has its `run`.
 */
export function orderedAdvisories(found) {
  const all = found.flatMap(({ run, answer }) =>
    answer.advisories.map((/** @type {any} */ each) => ({ run, ...each })),
  );
  return all.sort(
    (a, b) =>
      Number(a.ended !== null) - Number(b.ended !== null) ||
      SEVERITIES.indexOf(a.severity) - SEVERITIES.indexOf(b.severity) ||
      b.step - a.step,
  );
}

export class AdvisoryList {
  constructor() {
    this.element = h("section", { class: "advisories", "aria-label": "Advisories" });
    this.isAllShown = false;
  }

  /** @param {{run: any, answer: any}[]} found @param {boolean} isComplete False while answers are on their way. */
  show(found, isComplete) {
    const all = orderedAdvisories(found);
    const shown = this.isAllShown ? all.slice(0, 60) : all.slice(0, MOST_ADVISORIES);
    const more = all.length - shown.length;
    const isJudged = found.some(({ answer }) => answer.judged);
    const well = h(
      "p",
      { class: "all-well" },
      badge("no advisories", "good"),
      " The figures of all steps are within their bounds.",
    );
    const rest = h("button", { type: "button" }, `Show ${counted(more, "more advisory", "more advisories")}`);
    rest.addEventListener("click", () => {
      this.isAllShown = true;
      this.show(found, isComplete);
    });
    fill(
      this.element,
      shown.map((each) => advisoryCard(each, found.length > 1)),
      !all.length && isJudged && isComplete ? well : null,
      more > 0 && !this.isAllShown ? rest : null,
    );
  }
}

/**
 * Return an advisory, all of which is a link to the place that shows most of its cause. Further places are links in it.
 * @param {any} advisory
 * @param {boolean} withRun
 */
function advisoryCard({ run, ...advisory }, withRun) {
  const [main, ...further] = causePlaces(run.id, advisory);
  const tone =
    advisory.ended !== null
      ? "past"
      : { error: "bad", warning: "warn", notice: "info" }[/** @type {"error"} */ (advisory.severity)];
  const figures = Object.entries(advisory.figure)
    .map(([name, value]) => `${words(name)} ${figure(value)}`)
    .join(" \u00b7 ");
  const steps =
    advisory.first_step === advisory.step
      ? `step ${advisory.step}`
      : `steps ${advisory.first_step}\u2013${advisory.step}`;
  const state = advisory.ended !== null ? ` \u00b7 ended at step ${advisory.ended}` : "";
  return h(
    "article",
    { class: `advisory ${tone}` },
    h(
      "span",
      { class: "advisory-head" },
      badge(advisory.severity, tone),
      h("b", {}, words(advisory.name)),
      h(
        "span",
        { class: "muted" },
        steps + state,
        advisory.computed ? " \u00b7 computed now" : "",
        withRun ? " \u00b7 " : "",
        withRun ? foreign(run.name) : "",
      ),
      h(
        "span",
        { class: "figures" },
        figures,
        advisory.bound === null ? "" : ` \u00b7 bound ${figure(advisory.bound)}`,
      ),
    ),
    h(
      "span",
      { class: "advisory-text" },
      foreign(advisory.message),
      advisory.cause && advisory.ended === null
        ? h("span", { class: "advisory-more" }, h("i", {}, "Likely cause: "), foreign(advisory.cause))
        : null,
      advisory.remedy && advisory.ended === null
        ? h("span", { class: "advisory-more" }, h("i", {}, "Remedy: "), foreign(advisory.remedy))
        : null,
    ),
    h(
      "span",
      { class: "advisory-places" },
      h("a", { class: "advisory-main", href: main.href }, `See ${main.title}`),
      further.map((place) => h("a", { href: place.href }, place.title)),
    ),
  );
}
