import assert from "node:assert/strict";
import { test } from "node:test";
import {
  TOKEN_COLOURS,
  differenceStrength,
  tokenColour,
} from "../../../../verl_server/watch/site/static/js/colours.js";
import {
  differenceOf,
  firstOfLine,
  layoutTokens,
  tokenAt,
  tokenText,
  tokenValue,
} from "../../../../verl_server/watch/site/static/js/tokenlayout.js";

const measure = (text) => 10 * text.length;

function windowOf(text, others = {}) {
  const count = text.length;
  const all = (value) => new Array(count).fill(value);
  return {
    start: 0,
    total: count,
    id: all(7),
    text,
    special: all(0),
    mask: all(1),
    logprob: all(-1),
    policy: null,
    trainer: null,
    entropy: null,
    weight: null,
    versions: ["a"],
    version: all(0),
    turn: all(0),
    ...others,
  };
}

test("tokens fill lines, and a line end and a new turn break them", () => {
  const layout = layoutTokens(windowOf(["aaa", "bbb", "c\n", "dd", "ee"], { turn: [0, 0, 0, 0, 1] }), 70, measure);
  assert.deepEqual([...layout.line], [0, 0, 1, 2, 3]);
  assert.equal(layout.lines, 4);
  assert.deepEqual([...layout.x], [0, 35, 0, 0, 0]);
});

test("a token that is wider than the line gets a line of its own", () => {
  const layout = layoutTokens(windowOf(["a", "x".repeat(50), "b"]), 70, measure);
  assert.deepEqual([...layout.line], [0, 1, 2]);
  assert.ok(layout.widths[1] <= 70);
});

test("the token under a point", () => {
  const layout = layoutTokens(windowOf(["aaa", "bbb", "c\n", "dd"]), 70, measure);
  assert.equal(tokenAt(layout, 40, 0), 1);
  assert.equal(tokenAt(layout, 99, 0), -1);
  assert.equal(tokenAt(layout, 5, 9), -1);
  assert.equal(firstOfLine(layout, 1), 2);
});

test("line ends, empty texts and ids are visible", () => {
  assert.equal(tokenText(windowOf(["a\r\n"]), 0), "a\u21b5");
  assert.equal(tokenText(windowOf([""]), 0), "\u2205");
  assert.equal(tokenText(windowOf(["a"], { text: null }), 0), "7");
  assert.equal(tokenText(windowOf(["x".repeat(200)]), 0).length, 60);
});

test("the difference is the trainer's minus the policy's", () => {
  const window = windowOf(["a", "b"], { trainer: [-1.5, "NaN"], policy: [-2, -2] });
  assert.equal(differenceOf(window, 0), 0.5);
  assert.ok(Number.isNaN(differenceOf(window, 1)));
  assert.equal(differenceOf(windowOf(["a"]), 0), null);
});

test("versions are numbered over the whole episode", () => {
  const window = windowOf(["a", "b"], { versions: ["v7"], version: [0, -1] });
  assert.equal(
    tokenValue(
      window,
      0,
      "version",
      new Map([
        ["v6", 0],
        ["v7", 1],
      ]),
    ),
    1,
  );
  assert.equal(tokenValue(window, 1, "version", new Map()), null);
});

test("each way to colour has a colour, and none for what is unknown", () => {
  for (const { name } of TOKEN_COLOURS) {
    assert.equal(tokenColour(name, null, false), null);
    assert.match(tokenColour(name, 1, true) ?? "", /^rgba\(/);
    assert.match(tokenColour(name, NaN, false), /^rgba\(/);
  }
});

test("the colour of a difference grows with its size, on both sides of 0", () => {
  assert.equal(differenceStrength(0), 0);
  assert.equal(differenceStrength(5), 1);
  assert.ok(differenceStrength(-0.01) > differenceStrength(-0.001));
  assert.notEqual(tokenColour("difference", 0.5, false), tokenColour("difference", -0.5, false));
});
