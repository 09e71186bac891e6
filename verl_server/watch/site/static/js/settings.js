/**
 * `settingsThatDiffer`: the settings in which the runs differ, as a table that is made when the reader opens it.
 *
 * `overview` shows it below the list of the runs.
 */

import { errorState, fill, foreign, h, loadingState } from "./dom.js";
import { moment } from "./format.js";

const MOST_SETTINGS = 80;

/**
 * @param {any[]} runs Entries of /api/runs.
 * @param {(run: any) => Promise<any>} load Returns the `RunSettings` of a run.
 */
export function settingsThatDiffer(runs, load) {
  const body = h("div", {});
  const details = h("details", { class: "differences" }, h("summary", {}, "Settings that differ"), body);
  details.addEventListener("toggle", async () => {
    if (!details.open || body.children.length) return;
    fill(body, loadingState());
    try {
      const answers = await Promise.all(runs.map(load));
      fill(
        body,
        settingsTable(
          runs,
          answers.map((answer) => flatSettings(answer.settings)),
        ),
      );
    } catch (error) {
      fill(body, errorState(error));
    }
  });
  return details;
}

/**
 * Return settings with names such as "grpo.learning_rate", and their values as text.
 * @param {any} settings
 * @param {string} [prefix]
 * @returns {Record<string, string>}
 */
export function flatSettings(settings, prefix = "") {
  /** @type {Record<string, string>} */
  const flat = {};
  for (const [name, value] of Object.entries(settings ?? {})) {
    if (value !== null && typeof value === "object" && !Array.isArray(value))
      Object.assign(flat, flatSettings(value, `${prefix}${name}.`));
    else flat[prefix + name] = typeof value === "string" ? value : JSON.stringify(value);
  }
  return flat;
}

/** @param {any[]} runs @param {Record<string, string>[]} settings */
function settingsTable(runs, settings) {
  const names = [...new Set(settings.flatMap((each) => Object.keys(each)))].sort();
  const different = names
    .filter((name) => new Set(settings.map((each) => each[name] ?? "")).size > 1)
    .slice(0, MOST_SETTINGS);
  if (!different.length) return h("p", { class: "muted" }, "The runs have the same settings.");
  return h(
    "table",
    {},
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        h("th", {}, "setting"),
        runs.map((run) => h("th", { scope: "col", title: moment(run.started) }, foreign(run.name))),
      ),
    ),
    h(
      "tbody",
      {},
      different.map((name) =>
        h(
          "tr",
          {},
          h("th", { scope: "row" }, foreign(name)),
          settings.map((each) => h("td", {}, foreign((each[name] ?? "\u2013").slice(0, 120)))),
        ),
      ),
    ),
  );
}
