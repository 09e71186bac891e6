/**
 * The charts of the overview: which columns of metrics.jsonl they show, and how.
 *
 * `overview` gives the list to `ChartGrid`. A chart without data in all runs is hidden, so that runs of every kind and
 * version have what they have.
 */

import { checkpointNote, evaluationLines } from "./evaluations.js";
import { duration, evaluationPlace, figure, percent, toNumber, words } from "./format.js";

/** @typedef {import("./charts.js").RunTable} RunTable */
/** @typedef {import("./charts.js").Line} Line */

/**
 * Make the table of a run from its answers.
 * @param {any} run Entry of /api/runs.
 * @param {number} index Place among all runs.
 * @param {any} metrics `Metrics` in answers/runs.py.
 * @param {any[]} [evaluations] `Evaluation` in answers/evaluations.py, by their steps.
 * @returns {RunTable}
 */
export function runTable(run, index, metrics, evaluations = []) {
  const numbers = (/** @type {any[] | undefined} */ column) => column?.map(toNumber);
  return {
    id: run.id,
    name: run.name,
    index,
    step: metrics.step,
    names: metrics.names,
    evaluations,
    column(name) {
      const values = numbers(metrics.values[name]);
      if (!values || values.every((value) => value === null)) return null;
      return { name, values, low: numbers(metrics.low[name]), high: numbers(metrics.high[name]) };
    },
  };
}

/**
 * The columns that the run has, each with its own name or another one: [column, name].
 * @param {...(string | [string, string])} names
 * @returns {(table: RunTable) => Line[]}
 */
function columns(...names) {
  return (table) =>
    names.flatMap((each) => {
      const [column, name] = typeof each === "string" ? [each, each] : each;
      const line = table.column(column);
      return line ? [{ ...line, name }] : [];
    });
}

/**
 * The first of these columns that the run has.
 * @param {...string} names
 * @returns {(table: RunTable) => Line[]}
 */
function firstColumn(...names) {
  return (table) => columns(...names)(table).slice(0, 1);
}

/**
 * A column divided by another one.
 * @param {string} name
 * @param {string} part
 * @param {string} whole
 * @returns {(table: RunTable) => Line[]}
 */
function quotient(name, part, whole) {
  return (table) => {
    const [above, below] = [table.column(part), table.column(whole)];
    if (!above || !below) return [];
    const values = above.values.map((value, index) => {
      const by = below.values[index];
      return value === null || by === null || by === 0 ? null : value / by;
    });
    return [{ name, values }];
  };
}

/**
 * The columns whose names begin with `prefix`, without it. Columns that are 0 all the time are left out.
 * @param {string} prefix
 * @returns {(table: RunTable) => Line[]}
 */
function family(prefix) {
  return (table) =>
    table.names
      .filter((name) => name.startsWith(prefix))
      .map((name) => ({ line: table.column(name), short: name.slice(prefix.length) }))
      .filter(({ line }) => line?.values.some((value) => value !== null && value !== 0))
      .map(({ line, short }) => ({ name: short, values: line?.values ?? [] }));
}

/**
 * A figure of each environment of a mixture, by the environment's name.
 * @param {string} figure
 * @returns {(table: RunTable) => Line[]}
 */
function ofEnvironments(figure) {
  const [begin, end] = ["environments.", `.${figure}`];
  return (table) => {
    const found = table.names.filter((name) => name.startsWith(begin) && name.endsWith(end));
    return columns(
      ...found.map((name) => /** @type {[string, string]} */ ([name, name.slice(begin.length, -end.length)])),
    )(table);
  };
}

/** The phases of a step; old runs have the seconds of some of them in their metrics. @param {RunTable} table */
function phases(table) {
  const found = family("phases.")(table);
  if (found.length) return found;
  return columns(
    "rollout_seconds",
    "train_seconds",
    "sync_seconds",
  )(table).map((line) => ({ ...line, name: line.name.replace("_seconds", "") }));
}

/** @type {import("./charts.js").ChartSpec[]} */
export const CHARTS = [
  { id: "reward", title: "Reward", hint: "Mean reward of the scored episodes", lines: columns("reward") },
  {
    id: "held-out",
    title: "Held-out reward",
    hint: "Mean reward on tasks that no step trains on. A hollow point is incomplete, a ring is the best one. A click opens the episodes",
    lines: evaluationLines("reward"),
    place: evaluationPlace,
    note: checkpointNote,
  },
  {
    id: "held-out-success",
    title: "Held-out success",
    hint: "Share of the held-out episodes that succeeded (--eval-success)",
    lines: evaluationLines("success"),
    place: evaluationPlace,
    note: checkpointNote,
    zero: true,
    format: percent,
  },
  {
    id: "success",
    title: "Success",
    hint: "Share of the episodes that succeeded",
    lines: columns("success"),
    zero: true,
    format: percent,
  },
  {
    id: "length",
    title: "Length",
    hint: "Sampled tokens an episode",
    lines: quotient("tokens", "sampled_tokens", "trajectories"),
    zero: true,
  },
  { id: "turns", title: "Turns", hint: "Turns an episode", lines: columns("turns"), zero: true },
  {
    id: "environments",
    title: "Reward by environment",
    hint: "Mean reward of the scored episodes of each environment of a mixture",
    lines: ofEnvironments("reward"),
  },
  {
    id: "metrics",
    title: "Metrics of the environment",
    hint: "Means over the episodes of what an environment of verifiers computed beside the reward",
    lines: family("episode_metrics."),
    optional: true,
  },
  {
    id: "entropy",
    title: "Entropy",
    hint: "Entropy of the policy at the trained tokens, in nats. Near 0, the policy explores no more",
    lines: firstColumn("losses.entropy", "entropy"),
    zero: true,
  },
  {
    id: "kl",
    title: "KL",
    hint: "How far the policy is from the one that sampled (behaviour), and from the reference",
    lines: columns(["losses.behaviour_kl", "behaviour"], ["losses.kl_reference", "reference"]),
    zero: true,
  },
  {
    id: "gap",
    title: "Gap, trainer to server",
    hint: "Difference between the log-probabilities of trainer and server: the largest and the mean. The axis is logarithmic",
    lines: columns(["logprob_gap", "largest"], ["logprob_gap_mean", "mean"]),
    log: true,
  },
  {
    id: "age",
    title: "Age",
    hint: "Pushes between sampling and training: mean and largest",
    lines: columns(["age", "mean"], ["age_max", "largest"]),
    zero: true,
  },
  {
    id: "clip",
    title: "Clip share",
    hint: "Share of the tokens whose ratio was clipped",
    lines: columns("losses.clip_fraction"),
    zero: true,
    format: percent,
  },
  {
    id: "sample",
    title: "Effective sample size",
    hint: "Share of the tokens that the importance weights leave",
    lines: columns("losses.effective_sample_size"),
    zero: true,
    format: percent,
  },
  {
    id: "speed",
    title: "Tokens per second",
    hint: "Sampled tokens per second of the rollout",
    lines: columns("tokens_per_s"),
    zero: true,
  },
  {
    id: "phases",
    title: "Seconds by phase",
    hint: "Where the time of a step goes, for one run",
    lines: phases,
    stacked: true,
    format: duration,
  },
  {
    id: "idle",
    title: "Idle share",
    hint: "Share of the step in which the trainer, and the servers, had nothing to do",
    lines: columns(["idle.trainer", "trainer"], ["idle.servers", "servers"]),
    zero: true,
    format: percent,
  },
  {
    id: "failures",
    title: "Failures by fault",
    hint: "Episodes that failed, by who caused it, for one run",
    lines: family("failures."),
    stacked: true,
  },
  {
    id: "truncated",
    title: "Truncated",
    hint: "Share of the episodes that a limit of turns or tokens cut",
    lines: quotient("truncated", "truncated", "trajectories"),
    zero: true,
    format: percent,
  },
  {
    id: "spread",
    title: "Groups without spread",
    hint: "Share of the groups in which all rewards are alike: nothing to learn from",
    lines: quotient("without spread", "groups_without_spread", "groups"),
    zero: true,
    format: percent,
  },
  {
    id: "gradient",
    title: "Gradient norm",
    hint: "Norm of the gradient before clipping",
    lines: columns(["losses.grad_norm", "policy"], ["losses.value_grad_norm", "critic"]),
    zero: true,
  },
  {
    id: "explained",
    title: "Explained variance",
    hint: "Share of the returns' variance that PPO's critic knows before it is trained: 1 all, 0 none, below 0 it misleads",
    lines: columns("losses.explained_variance"),
    optional: true,
  },
  {
    id: "value",
    title: "Value and return",
    hint: "What PPO's critic expects of a turn, and what follows it: means over turns",
    lines: columns(["losses.value", "value"], ["losses.return", "return"]),
    optional: true,
  },
  {
    id: "value-loss",
    title: "Value loss",
    hint: "Half of the squared distance between value and return, clipped",
    lines: columns("losses.value_loss"),
    zero: true,
    optional: true,
  },
  {
    id: "cache",
    title: "Cache hits",
    hint: "Share of the prompt tokens that the prefix caches of the servers had",
    lines: columns("cache_hit_rate"),
    zero: true,
    format: percent,
  },
];

/**
 * The chart of any column.
 * @param {string} name
 * @returns {import("./charts.js").ChartSpec}
 */
export function chartOf(name) {
  return { id: `column-${name}`, title: words(name), hint: name, lines: columns(name), format: figure };
}
