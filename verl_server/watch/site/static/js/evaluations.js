/**
 * Evaluations on held-out tasks: their lines in charts, their table, and the facts of one.
 *
 * `overview` loads and shows them, `figures` draws them, and `step` shows the facts above the episodes of one. The
 * entries are those of `Evaluation` in answers/evaluations.py.
 */

import { badge, fill, foreign, h } from "./dom.js";
import { counted, duration, evaluationPlace, figure, percent, toNumber, whole } from "./format.js";
import { fact } from "./heads.js";
import { address, link } from "./places.js";

const MOST_EVALUATIONS = 200;
const MOST_SUMMARIES = 4;

/**
 * Return all evaluations of a run, and the step of the one that plays now.
 * @param {import("./api.js").Api} api
 * @param {string} run
 * @returns {Promise<{evaluations: any[], playing: number | null}>}
 */
export async function loadEvaluations(api, run) {
  /** @type {any[]} */
  const evaluations = [];
  let after = null;
  let answer;
  do {
    answer = await api.get(address(["runs", run, "evaluations"], { after }));
    evaluations.push(...answer.evaluations);
    after = answer.next;
  } while (after !== null && api.has(address(["runs", run, "evaluations"], { after })));
  return { evaluations, playing: answer.playing };
}

/**
 * The lines of a figure over the evaluations: those that can be compared, the incomplete ones, and the best one.
 * @param {"reward" | "success"} name
 * @returns {(table: import("./charts.js").RunTable) => import("./charts.js").Line[]}
 */
export function evaluationLines(name) {
  return ({ evaluations }) => {
    /** @type {[string, any, (each: any) => boolean][]} */
    const kinds = [
      [name, "points", (each) => each.incomplete === null],
      ["incomplete", "hollow", (each) => each.incomplete !== null],
      ["best", "ring", (each) => each.best],
    ];
    return kinds.flatMap(([title, style, has]) => {
      const found = evaluations.filter((each) => has(each) && each[name] !== null);
      if (!found.length) return [];
      return [
        { name: title, style, step: found.map(({ step }) => step), values: found.map((each) => toNumber(each[name])) },
      ];
    });
  };
}

/**
 * Say what became of the weights that the cursor is on, if they are of one run alone.
 * @param {import("./charts.js").RunTable[]} tables
 * @param {number} step
 */
export function checkpointNote(tables, step) {
  const found = tables.flatMap(({ evaluations }) => evaluations.filter((each) => each.step === step).slice(-1));
  return found.length === 1 ? checkpointText(found[0]) : "";
}

/** @param {any} evaluation */
function checkpointText({ checkpoint }) {
  return checkpoint ? "checkpoint kept" : "checkpoint removed";
}

/** The marks of an evaluation: the best one, or the reason why it is incomplete. @param {any} evaluation */
function evaluationMarks({ best, incomplete }) {
  return [
    best ? badge("best", "good", "The highest mean reward of the complete evaluations") : null,
    incomplete === null ? null : badge(`incomplete: ${incomplete}`.slice(0, 60), "warn", incomplete),
  ];
}

/**
 * Return the facts of an evaluation that its episodes do not tell.
 * @param {any} evaluation
 */
export function evaluationFacts(evaluation) {
  return [
    ...evaluationMarks(evaluation),
    fact("success", percent(evaluation.success)),
    fact("version", evaluation.version),
    evaluation.unfinished ? fact("unfinished", whole(evaluation.unfinished), "warn-text") : null,
    fact("played in", duration(evaluation.seconds)),
    fact("push held", duration(evaluation.push_delay)),
    fact("checkpoint", evaluation.checkpoint ? "kept" : "removed"),
  ];
}

/** The evaluations of the runs: a line about the best of each run, and a table that opens below it. */
export class EvaluationTable {
  constructor() {
    this.summary = h("summary", {});
    this.body = h("div", {});
    this.element = h("details", { class: "evaluations", hidden: true }, this.summary, this.body);
    this.key = "";
  }

  /** @param {{run: any, evaluations: any[], playing: number | null}[]} found Those of each run. */
  show(found) {
    const used = found.filter(({ evaluations, playing }) => evaluations.length || playing !== null);
    this.element.hidden = !used.length;
    const key = JSON.stringify(used.map(({ run, ...rest }) => [run.id, run.name, rest]));
    if (!used.length || key === this.key) return;
    this.key = key;
    fill(this.summary, ...evaluationSummary(used));
    fill(this.body, evaluationTable(used));
  }
}

/** @param {{run: any, evaluations: any[], playing: number | null}[]} used */
function evaluationSummary(used) {
  const count = used.reduce((sum, { evaluations }) => sum + evaluations.length, 0);
  const texts = used.slice(0, MOST_SUMMARIES).flatMap(({ run, evaluations, playing }) => {
    const best = evaluations.find((each) => each.best);
    const told = best ? `best ${figure(best.reward)} at step ${best.step}, ${checkpointText(best)}` : "none is complete";
    const now = playing === null ? "" : `, one plays at step ${playing}`;
    return [" \u00b7 ", used.length > 1 ? foreign(`${run.name}: `) : "", `${evaluations.length ? told : ""}${now}`];
  });
  return ["Evaluations on held-out tasks: ", whole(count), ...texts];
}

/** @param {{run: any, evaluations: any[]}[]} used */
function evaluationTable(used) {
  const rows = used.flatMap(({ run, evaluations }) => [...evaluations].reverse().map((each) => ({ run, each })));
  const isOne = used.length === 1;
  const titles = ["step", "reward", "success", "scored", "failed", "played in", "push held"];
  const left = rows.length - MOST_EVALUATIONS;
  return [
    h(
      "table",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          isOne ? null : h("th", { scope: "col" }, "run"),
          titles.map((title) => h("th", { scope: "col", class: "number" }, title)),
          h("th", { scope: "col" }, "checkpoint"),
          h("th", { scope: "col" }, "version"),
          h("th", {}),
        ),
      ),
      h(
        "tbody",
        {},
        rows.slice(0, MOST_EVALUATIONS).map(({ run, each }) =>
          h(
            "tr",
            {},
            isOne ? null : h("td", {}, foreign(run.name)),
            h(
              "td",
              { class: "number" },
              h("a", { href: link("step", [run.id, evaluationPlace(each.step)]), title: "Its episodes" }, each.step),
            ),
            h("td", { class: "number" }, figure(each.reward)),
            h("td", { class: "number" }, percent(each.success)),
            h("td", { class: `number${each.unfinished ? " warn-text" : ""}` }, scoredText(each)),
            h("td", { class: `number${each.failed ? " bad-text" : ""}` }, whole(each.failed)),
            h("td", { class: "number" }, duration(each.seconds)),
            h("td", { class: "number" }, duration(each.push_delay)),
            h("td", { class: each.checkpoint ? null : "muted" }, each.checkpoint ? "kept" : "removed"),
            h("td", {}, foreign(each.version)),
            h("td", {}, evaluationMarks(each)),
          ),
        ),
      ),
    ),
    left > 0 ? h("p", { class: "muted" }, `${counted(left, "earlier evaluation")} more.`) : null,
  ];
}

/** @param {any} evaluation */
function scoredText({ episodes, failed, unfinished }) {
  return failed || unfinished ? `${whole(episodes)} of ${whole(episodes + failed + unfinished)}` : whole(episodes);
}
