import assert from "node:assert/strict";
import { test } from "node:test";
import { CHARTS, chartOf, runTable } from "../../../../verl_server/watch/site/static/js/figures.js";
import { kindColour, rewardColour, runColour } from "../../../../verl_server/watch/site/static/js/colours.js";

const METRICS = {
  names: ["losses.behaviour_kl", "phases.rollout", "phases.train", "reward", "sampled_tokens", "trajectories"],
  step: [0, 1],
  values: {
    reward: [0.5, "NaN"],
    "losses.behaviour_kl": [null, null],
    "phases.rollout": [4, 5],
    "phases.train": [2, 2],
    sampled_tokens: [640, 6],
    trajectories: [64, 0],
  },
  low: {},
  high: {},
};
const table = runTable({ id: "r", name: "run" }, 0, METRICS);
const lines = (id) => CHARTS.find((chart) => chart.id === id).lines(table);

test("charts take their columns, and have no line without data", () => {
  assert.deepEqual(lines("reward")[0].values, [0.5, NaN]);
  assert.deepEqual(lines("kl"), []);
  assert.deepEqual(lines("success"), []);
  assert.deepEqual(
    lines("phases").map(({ name }) => name),
    ["rollout", "train"],
  );
  assert.deepEqual(chartOf("reward").lines(table)[0].values, [0.5, NaN]);
});

test("the rewards of a mixture are one line an environment", () => {
  const names = ["environments.a.b.reward", "environments.a.b.turns", "environments.hard.reward", "reward"];
  const values = { "environments.a.b.reward": [0.5, null], "environments.hard.reward": [null, 0.25], reward: [0.5, 0.25] };
  const mixed = runTable({ id: "r", name: "run" }, 0, { names, step: [0, 1], values, low: {}, high: {} });
  const chart = CHARTS.find(({ id }) => id === "environments");
  assert.deepEqual(
    chart.lines(mixed).map((line) => [line.name, line.values]),
    [
      ["a.b", [0.5, null]],
      ["hard", [null, 0.25]],
    ],
  );
  assert.deepEqual(lines("environments"), []);
});

test("a quotient has no value where its divisor is 0", () => {
  assert.deepEqual(lines("length")[0].values, [10, null]);
});

const evaluation = (step, reward, more) => ({ step, reward, success: null, incomplete: null, best: false, checkpoint: false, ...more });
const EVALUATIONS = [
  evaluation(0, 0.25),
  evaluation(20, 0.75, { best: true, checkpoint: true }),
  evaluation(40, 0.9, { incomplete: "timeout" }),
  evaluation(40, null, { incomplete: "unscored" }),
  evaluation(40, 0.5),
];

test("evaluations have their own steps, and incomplete ones are apart from the line", () => {
  const evaluated = runTable({ id: "r", name: "run" }, 0, METRICS, EVALUATIONS);
  const { lines, place, note } = CHARTS.find((chart) => chart.id === "held-out");
  assert.deepEqual(lines(evaluated), [
    { name: "reward", style: "points", step: [0, 20, 40], values: [0.25, 0.75, 0.5] },
    { name: "incomplete", style: "hollow", step: [40], values: [0.9] },
    { name: "best", style: "ring", step: [20], values: [0.75] },
  ]);
  assert.deepEqual(CHARTS.find((chart) => chart.id === "held-out-success").lines(evaluated), []);
  assert.deepEqual(lines(table), []);
  assert.equal(place(20), "held-out-20");
  assert.equal(note([evaluated], 20), "checkpoint kept");
  assert.equal(note([evaluated], 40), "checkpoint removed");
  assert.equal(note([evaluated, evaluated], 20), "", "of two runs, it is unclear which one is meant");
  assert.equal(note([evaluated], 5), "");
});

test("ids of charts are unique", () => {
  assert.equal(new Set(CHARTS.map(({ id }) => id)).size, CHARTS.length);
});

test("colours are stable and differ in light and dark", () => {
  assert.equal(runColour(1, false), runColour(8, false));
  assert.notEqual(runColour(1, false), runColour(1, true));
  assert.equal(kindColour("a new phase", false), kindColour("a new phase", false));
  assert.notEqual(kindColour("generate", false), kindColour("env", false));
  assert.notEqual(rewardColour(0, 0, 1, false), rewardColour(1, 0, 1, false));
  assert.match(rewardColour(null, 0, 1, false), /^#/);
});
