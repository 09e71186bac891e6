import assert from "node:assert/strict";
import { test } from "node:test";
import {
  GUTTER,
  countsText,
  hitText,
  laneAt,
  layoutLanes,
  timeToX,
  xToTime,
} from "../../../../verl_server/watch/site/static/js/lanes.js";
import { markText, panned, timeMarks, zoomed } from "../../../../verl_server/watch/site/static/js/timeaxis.js";

const ANSWER = {
  begin: 100,
  end: 110,
  first: 90,
  last: 120,
  trainer: [
    ["rollout", 100, 104, 3],
    ["train", 104, 106, 3],
  ],
  pushes: [
    ["v4", 106, 106.01, null],
    ["v5", 107, 107.5, "timeout"],
  ],
  evaluations: [],
  servers: [{ url: "http://127.0.0.1:30000", spans: [["up", 90, 120]] }],
  episodes: [
    {
      row: "f:0:a",
      label: "3-0",
      step: 3,
      stop_reason: "done",
      begin: 100,
      end: 103,
      parts: [
        ["env", 100, 101],
        ["generate", 101, 102.5],
      ],
    },
  ],
  total: 1,
  counts: { time: [100, 105], interval: 5, generate: [2, 1], env: [1, 0], queue: [0, 0], other: [0, 0], share: 1 },
  idle: {},
  notes: [],
};

test("lanes lie below each other, in the order of the answer", () => {
  const { lanes, height } = layoutLanes(ANSWER);
  assert.deepEqual(
    lanes.map((lane) => lane.kind),
    ["trainer", "push", "server", "counts", "episode"],
  );
  lanes.slice(1).forEach((lane, index) => assert.ok(lane.top >= lanes[index].top + lanes[index].height));
  assert.ok(height > lanes[4].top + lanes[4].height);
});

test("moments and places are inverse", () => {
  assert.equal(timeToX(100, [100, 110], 1000), GUTTER);
  assert.ok(Math.abs(xToTime(timeToX(104.2, [100, 110], 1000), [100, 110], 1000) - 104.2) < 1e-9);
});

test("a point finds its lane and span, a narrow span within the slack", () => {
  const { lanes } = layoutLanes(ANSWER);
  const y = (kind) => lanes.find((lane) => lane.kind === kind).top + 2;
  assert.equal(laneAt(lanes, 101.5, y("episode"), 0).span.kind, "generate");
  assert.equal(laneAt(lanes, 106.05, y("push"), 0).span, null);
  assert.equal(laneAt(lanes, 106.05, y("push"), 0.1).span.text, "push of v4");
  assert.equal(laneAt(lanes, 101, 9999, 0), null);
});

test("what lies under the pointer is told with its duration", () => {
  const { lanes } = layoutLanes(ANSWER);
  const hit = laneAt(lanes, 101.5, lanes[4].top + 2, 0);
  assert.deepEqual(hitText(hit, ANSWER, 101.5), [
    "generating \u00b7 1.5 s",
    "episode 3-0, step 3 \u00b7 done after 3 s",
  ]);
  assert.equal(countsText(ANSWER.counts, 101), "2 generating, 1 waiting for the environment");
  assert.equal(countsText(ANSWER.counts, 200), "");
});

test("what waits for an evaluation names it, and the time for which it held the push", () => {
  const evaluation = { step: 20, begin: 101, end: 109, reward: 0.5, push_delay: 2.5, incomplete: null };
  const trainer = [
    ["train", 104, 106, 20],
    ["held", 106, 108.5, 20],
    ["held", 130, 131, 30],
  ];
  const { lanes } = layoutLanes({ ...ANSWER, trainer, evaluations: [evaluation] });
  const [, held, other] = lanes[0].spans;
  assert.deepEqual(hitText({ lane: lanes[0], span: held }, ANSWER, 107), [
    "step 20: held \u00b7 2.5 s",
    "push held 2.5 s by the evaluation at step 20",
  ]);
  assert.equal(other.more, "push held 1 s by an evaluation");
  const lane = lanes.find(({ kind }) => kind === "evaluation");
  assert.deepEqual(hitText({ lane, span: lane.spans[0] }, ANSWER, 107), [
    "evaluation at step 20: reward 0.5 \u00b7 8 s",
    "push held 2.5 s by the evaluation at step 20",
  ]);
  assert.equal(lane.spans[0].evaluation, 20);
});

test("an evaluation between two steps is what the trainer does then", () => {
  const evaluation = { step: 20, begin: 101, end: 109, reward: null, push_delay: null, incomplete: null };
  const { lanes } = layoutLanes({ ...ANSWER, trainer: [["evaluation", 101, 109, 20]], evaluations: [evaluation] });
  const [span] = lanes[0].spans;
  assert.equal(span.text, "evaluation at step 20: plays");
  assert.deepEqual([span.step, span.evaluation, span.more], [undefined, 20, ""]);
});

test("marks of the axis are round distances from the begin of the run", () => {
  assert.deepEqual(timeMarks([100, 110], 90, 5), [100, 102, 104, 106, 108, 110]);
  assert.deepEqual(timeMarks([5, 5], 0, 5), []);
  assert.equal(markText(75, 100), "1:15");
  assert.equal(markText(3675, 5000), "1:01:15");
  assert.equal(markText(0.25, 0.5), "0.25 s");
  assert.equal(markText(216000, 800000), "2.5 d");
});

test("zooming keeps the center, and windows stay inside of the run", () => {
  assert.deepEqual(zoomed([0, 10], 0.5, 5, [0, 100]), [2.5, 7.5]);
  assert.deepEqual(zoomed([0, 10], 4, 5, [0, 20]), [0, 20]);
  assert.deepEqual(panned([0, 10], -5, [0, 100]), [0, 10]);
  assert.deepEqual(panned([85, 95], 50, [0, 100]), [90, 100]);
});
