import assert from "node:assert/strict";
import { test } from "node:test";
import {
  ago,
  bytes,
  capital,
  counted,
  duration,
  evaluatedStep,
  evaluationPlace,
  figure,
  fixed,
  oneLine,
  percent,
  placeName,
  shorten,
  toNumber,
  whole,
} from "../../../../verl_server/watch/site/static/js/format.js";

const plain = (text) => text.replaceAll("\u2009", " ").replaceAll("\u2212", "-");

test("numbers that JSON cannot hold travel as texts", () => {
  assert.equal(toNumber("Infinity"), Infinity);
  assert.equal(toNumber("-Infinity"), -Infinity);
  assert.ok(Number.isNaN(toNumber("NaN")));
  assert.equal(toNumber("7"), null);
  assert.equal(toNumber(null), null);
  assert.equal(figure("NaN"), "NaN");
  assert.equal(figure("Infinity"), "\u221e");
});

test("steps and other places have names", () => {
  assert.deepEqual([5, "12", "-", "untrained", evaluationPlace(40)].map(placeName), [
    "step 5",
    "step 12",
    "episodes",
    "untrained",
    "held-out at step 40",
  ]);
  assert.deepEqual(["held-out-40", "held-out-", "held-out", 40].map(evaluatedStep), [40, null, null, null]);
  assert.equal(capital("step 5"), "Step 5");
});

test("figures have about three digits", () => {
  const numbers = [0, 0.123456, 12.3456, 123.456, 12345.6, 1.6689e-6, -0.5, 64, 123456789, null];
  const texts = ["0", "0.123", "12.3", "123", "12 346", "1.7e-6", "-0.5", "64", "1.2e8", "\u2013"];
  assert.deepEqual(
    numbers.map((each) => plain(figure(each))),
    texts,
  );
  assert.equal(plain(fixed(-1.04, 1)), "-1.0");
  assert.equal(plain(whole(1234567)), "1 234 567");
  assert.equal(plain(percent(0.0312)), "3.1 %");
  assert.equal(plain(percent(0.4)), "40 %");
});

test("durations and sizes have the unit that suits them", () => {
  const seconds = [0, 0.0123, 0.5, 3.14159, 75, 3700, 400000];
  assert.deepEqual(seconds.map(duration), [
    "0 s",
    "12.3 ms",
    "500 ms",
    "3.14 s",
    "1 min 15 s",
    "1 h 1 min",
    "4.6 days",
  ]);
  assert.equal(bytes(10_400_000_000), "10.4 GB");
  assert.equal(bytes(12), "12 B");
  assert.equal(counted(1, "branch", "branches"), "1 branch");
  assert.equal(counted(2, "branch", "branches"), "2 branches");
  assert.equal(ago(100, 103), "just now");
  assert.equal(ago(100, 400), "5 min ago");
});

test("long texts are cut between characters", () => {
  assert.equal(shorten("abcdef", 4), "abc\u2026");
  assert.equal(shorten("\u{1F600}\u{1F600}\u{1F600}", 2), "\u{1F600}\u2026");
  assert.equal(shorten("abc", 3), "abc");
  assert.equal(oneLine("a\n\n  b\tc", 20), "a b c");
});
