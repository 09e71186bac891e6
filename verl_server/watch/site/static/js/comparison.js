/**
 * Two steps of an exported page by task: what the server answers with `Comparison`, of answers that the page holds.
 *
 * `compare` and `compareform` call it. An export has the groups of the steps that fit, and no comparisons. All functions
 * but `heldComparison` are pure.
 */

import { ApiError } from "./api.js";
import { evaluatedStep, placeName } from "./format.js";
import { address } from "./places.js";

/**
 * Pair the groups that played the same task, those with the largest change of the mean reward first.
 * @param {any} a `StepGroups` in the answers of the server.
 * @param {any} b
 * @returns {any} `Comparison`.
 */
export function comparisonOf(a, b) {
  const [left, right] = [a, b].map(
    (step) => new Map(step.groups.map((/** @type {any} */ group) => [group.task, group])),
  );
  const tasks = [...new Set([...left.keys(), ...right.keys()])];
  const pairs = tasks.map((task) => {
    const [one, other] = [left.get(task) ?? null, right.get(task) ?? null];
    const { seed, episode_id } = one ?? other;
    return { task, seed, episode_id, a: one, b: other };
  });
  const common = pairs.filter((pair) => pair.a && pair.b).length;
  return { a: a.step, b: b.step, pairs: pairs.sort((one, other) => place(one) - place(other)), common, next: null };
}

/** The place of a pair in the order, as the server sorts them. @param {any} pair */
function place({ a, b }) {
  if (!a || !b) return 2;
  return typeof a.mean === "number" && typeof b.mean === "number" ? -Math.abs(a.mean - b.mean) : 1;
}

/**
 * Return the steps of a run that an export holds, in their order.
 * @param {string[]} urls Addresses of its answers.
 * @param {string} run
 */
export function heldSteps(urls, run) {
  const begin = `${address(["runs", run, "steps"])}/`;
  const names = urls.filter((url) => url.startsWith(begin) && !url.includes("?"));
  const number = (/** @type {string} */ name) => evaluatedStep(name) ?? Number(name);
  return names.map((url) => decodeURIComponent(url.slice(begin.length))).sort((a, b) => number(a) - number(b));
}

/**
 * Compare a step of a run with one of another run, or of the same, in an exported page.
 * @param {import("./api.js").Api} api
 * @param {[any, any]} runs Entries of /api/runs.
 * @param {[string, string]} steps
 */
export async function heldComparison(api, runs, steps) {
  const urls = steps.map((step, side) => address(["runs", runs[side].id, "steps", step]));
  const missing = urls.findIndex((url) => !api.has(url));
  if (missing >= 0)
    throw new ApiError(
      404,
      `The groups of ${placeName(steps[missing])} of ${runs[missing].name} are not in this export.`,
      "The newest steps are exported first. --export-megabytes permits more; verl-server watch RUN has all of them.",
    );
  const [a, b] = await Promise.all(urls.map((url) => api.get(url)));
  return comparisonOf(a, b);
}
