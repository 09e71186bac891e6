/**
 * `compareForm`: the choice of a step to compare with, of the same run or of another one. The view Step shows it. An
 * evaluation is compared with evaluations, because they play the same tasks.
 */

import { heldSteps } from "./comparison.js";
import { h } from "./dom.js";
import { evaluatedStep, evaluationPlace } from "./format.js";
import { link } from "./places.js";

/**
 * @param {import("./main.js").Page} page
 * @param {string} run
 * @param {string} step
 * @param {string | number | null | undefined} previous The step before it.
 */
export function compareForm(page, run, step, previous) {
  const isEvaluation = evaluatedStep(step) !== null;
  const held = (/** @type {string} */ id) =>
    page.api.embedded
      ? heldSteps(Object.keys(page.api.embedded), id).filter((each) => (evaluatedStep(each) !== null) === isEvaluation)
      : null;
  const others = page.runs.filter((each) => each.id !== run && held(each.id)?.length !== 0);
  if (held(run)?.every((each) => each === step) && !others.length)
    return h(
      "span",
      { class: "muted" },
      `This export has no other ${isEvaluation ? "evaluation" : "step"} to compare with.`,
    );
  const runs = h(
    "select",
    { name: "with", "aria-label": "Run to compare with" },
    h("option", { value: run }, "this run"),
    others.map((each) => h("option", { value: each.id }, each.name)),
  );
  const steps = h("span", {});
  const form = h(
    "form",
    { class: "compare-form" },
    "compare with",
    others.length ? runs : null,
    h("label", {}, isEvaluation ? "the evaluation at step " : "step ", steps),
    h("button", { type: "submit" }, "Compare"),
  );
  /** The step that one most likely wants: the one before it, or the same one of another run. */
  const likely = () => (runs.value === run ? String(previous ?? "") : step);
  const draw = () => steps.replaceChildren(stepField(held(runs.value), likely()));
  /** The place that is meant by what was typed. @param {string} typed */
  const placeOf = (typed) => (isEvaluation && /^\d+$/.test(typed) ? evaluationPlace(Number(typed)) : typed);
  runs.addEventListener("change", draw);
  draw();
  form.addEventListener("submit", (/** @type {Event} */ event) => {
    event.preventDefault();
    const other = placeOf(steps.firstChild.value.trim()) || likely();
    if (other !== "") page.go(link("compare", [runs.value], { a: other, b: step, with: runs.value === run ? "" : run }));
  });
  return form;
}

/** @param {string[] | null} held Steps to choose from; null if the server has all. @param {string} likely */
function stepField(held, likely) {
  const props = { name: "other", "aria-label": "Step to compare with", class: "short" };
  const shown = (/** @type {string} */ place) => String(evaluatedStep(place) ?? place);
  if (!held) return h("input", { type: "text", inputmode: "numeric", placeholder: shown(likely) || "step", ...props });
  return h(
    "select",
    props,
    held.map((each) => h("option", { value: each, selected: each === likely }, shown(each))),
  );
}
