import assert from "node:assert/strict";
import { test } from "node:test";
import {
  decades,
  decayFor,
  extent,
  finiteParts,
  joinTables,
  nearest,
  positive,
  smooth,
  stack,
} from "../../../../verl_server/watch/site/static/js/series.js";

test("smoothing keeps a constant and a gap, and leaves out what is not finite", () => {
  const gap = smooth([0, 1, 2, 3], [4, null, 4, 4], 0.5);
  assert.deepEqual(gap, [4, null, 4, 4]);
  const soft = smooth([0, 1, 2, 3], [1, NaN, 1, 1], 0.5);
  assert.ok(soft.every((value) => Math.abs(value - 1) < 1e-12));
});

test("smoothing does not lag behind a trend", () => {
  const x = Array.from({ length: 101 }, (_, index) => index);
  const soft = smooth(x, x, 0.6);
  assert.ok(Math.abs(soft[50] - 50) < 1e-9);
});

test("smoothing weighs by the distance in x", () => {
  const near = smooth([0, 1], [0, 1], 0.5)[0];
  const far = smooth([0, 10], [0, 1], 0.5)[0];
  assert.ok(far < near && near < 0.5);
});

test("short runs are not smoothed", () => {
  assert.equal(decayFor([1, 2, 3]), 0);
  assert.ok(decayFor(Array.from({ length: 500 }, (_, index) => index)) > 0.8);
});

test("runs are joined on their steps", () => {
  const joined = joinTables([
    { x: [0, 2], columns: [[1, 2]] },
    { x: [1, 2], columns: [[3, 4], []] },
  ]);
  assert.deepEqual(joined.x, [0, 1, 2]);
  assert.deepEqual(joined.columns, [
    [[1, null, 2]],
    [
      [null, 3, 4],
      [null, null, null],
    ],
  ]);
});

test("areas lie on each other", () => {
  assert.deepEqual(
    stack([
      [1, null],
      [2, 3],
      [NaN, 1],
    ]),
    [
      [1, 0],
      [3, 3],
      [3, 4],
    ],
  );
});

test("values that cannot be drawn are marked or left out", () => {
  assert.deepEqual(finiteParts([1, NaN, null, Infinity]), { drawn: [1, null, null, null], marks: [1, 3] });
  assert.deepEqual(positive([1, 0, -1, null]), [1, null, null, null]);
});

test("the nearest entry", () => {
  assert.equal(nearest([0, 10, 20], 14), 1);
  assert.equal(nearest([0, 10, 20], 99), 2);
  assert.equal(nearest([], 1), -1);
});

test("a logarithmic axis has whole decades, also for one value", () => {
  assert.deepEqual(decades(null, 0.003, 0.04), [0.001, 0.1]);
  assert.deepEqual(decades(null, 0.01, 0.01), [0.001, 0.1]);
  assert.deepEqual(decades(null, 0.02, 0.02), [0.01, 0.1]);
  assert.deepEqual(decades(null, null, null), [0.1, 1]);
});

test("the range of several columns", () => {
  assert.deepEqual(extent([[0, 39], [0, 20, 40], []]), [0, 40]);
  assert.deepEqual(extent([[7], []]), [6.5, 7.5]);
  assert.deepEqual(extent([]), [0, 1]);
});
