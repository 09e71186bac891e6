/**
 * `causePlaces`: where the page shows what an advisory is about: episodes, a chart, settings, lanes, its step.
 *
 * `advisories` makes links of them. All functions are pure. The names are those of advisory_rules/rules.py; one that is
 * not known here, of a later version, leads to its step.
 */

import { link } from "./places.js";

/** @typedef {{title: string, href: string}} CausePlace */

const OPTIMIZER = "grpo.learning_rate,grpo.final_learning_rate,grpo.warmup_steps,grpo.epochs,grpo.minibatches,grpo.loss";
const ENTROPY = `${OPTIMIZER},grpo.entropy_coef,grpo.clip_high`;
const PRECISION = "compute_dtype,server.dtype,allow_dtype_mismatch,grpo.temperature";
const CACHE =
  "server.disable_radix_cache,server.mem_fraction_static,server.kv_cache_gib,server.max_total_tokens,max_concurrency";

/** Advisory -> id of the chart with the figure that it judges. */
const CHART_OF = /** @type {Record<string, string>} */ ({
  logprob_gap: "gap",
  failed: "failures",
  truncated: "truncated",
  groups_without_spread: "spread",
  behaviour_kl: "kl",
  entropy_collapse: "entropy",
  reward_collapse: "reward",
  trainer_idle: "idle",
  servers_idle: "idle",
  cache_hits: "cache",
  slow_phase: "phases",
});

/** Charts whose values have the unit of the bound: the others show counts, or seconds. */
const WITH_BOUND = ["gap", "truncated", "spread", "kl", "entropy", "reward", "idle", "cache"];

/**
 * Return the places, the one that shows most of the cause first.
 * @param {string} run Id of the run.
 * @param {any} advisory `Advisory` of answers.py.
 * @returns {CausePlace[]}
 */
export function causePlaces(run, advisory) {
  const { name, step, ended } = advisory;
  const until = ended ?? "";
  const ofStep = (/** @type {Record<string, string>} */ query = {}) => ({
    title: `step ${step}`,
    href: link("step", [run, step], query),
  });
  const settings = (/** @type {string} */ names) => ({
    title: "the settings",
    href: link("settings", [run], { name: names }),
  });
  const waits = { title: "who waits", href: link("waits", [run]) };
  const id = CHART_OF[name];
  const chart = { title: "the chart", href: link("overview", [], { chart: id }) };
  switch (name) {
    case "failed":
      return [
        { title: "the failed episodes", href: link("find", [run], { error: 1, to: until }) },
        chart,
        ofStep({ sort: "failed" }),
      ];
    case "truncated":
      return [
        { title: "the longest episodes", href: link("find", [run], { order: "-tokens", to: until }) },
        chart,
        ofStep({ sort: "tokens" }),
      ];
    case "groups_without_spread":
      return [{ ...ofStep({ sort: "flat" }), title: `the groups of step ${step}` }, chart];
    case "logprob_gap":
      return [chart, settings(PRECISION), ofStep()];
    case "behaviour_kl":
    case "reward_collapse":
      return [chart, settings(OPTIMIZER), ofStep()];
    case "entropy_collapse":
      return [chart, settings(ENTROPY), ofStep()];
    case "trainer_idle":
    case "servers_idle":
    case "slow_phase":
      return [waits, chart, ofStep()];
    case "cache_hits":
      return [chart, settings(CACHE), ofStep()];
    default:
      return [ofStep()];
  }
}

/**
 * Return the bounds that charts draw: those of the advisories that are true now.
 * @param {any[]} advisories `Advisory` of answers.py, of all runs that are drawn.
 * @returns {Record<string, number[]>} Id of a chart -> bounds.
 */
export function chartBounds(advisories) {
  /** @type {Record<string, number[]>} */
  const found = {};
  for (const { name, bound, ended } of advisories) {
    const id = CHART_OF[name];
    if (typeof bound !== "number" || ended !== null || !WITH_BOUND.includes(id)) continue;
    found[id] = [...new Set([...(found[id] ?? []), bound])];
  }
  return found;
}
