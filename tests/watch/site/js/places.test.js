import assert from "node:assert/strict";
import { test } from "node:test";
import {
  address,
  link,
  parsePlace,
  takeKey,
  windowStarts,
} from "../../../../verl_server/watch/site/static/js/places.js";

test("a link is read back as the place that it was made of", () => {
  const row = "trajectories-rank0.jsonl:18432:9f3c2a";
  const hash = link("episode", ["a run/b", row], { turn: 3, colour: "logprob", empty: "" });
  const place = parsePlace(hash);
  assert.equal(place.view, "episode");
  assert.deepEqual(place.parts, ["a run/b", row]);
  assert.deepEqual(place.query, { colour: "logprob", turn: "3" });
});

test("an empty hash is the overview, and broken escapes are text", () => {
  assert.equal(parsePlace("").view, "overview");
  assert.equal(parsePlace("#/").view, "overview");
  assert.deepEqual(parsePlace("#/step/%E0%A4%A/3").parts, ["%E0%A4%A", "3"]);
});

test("addresses are canonical", () => {
  const url = address(["runs", "a b", "steps", 3], { stop: "done", after: null, sort: "", fault: "policy" });
  assert.equal(url, "/api/runs/a%20b/steps/3?fault=policy&stop=done");
  assert.equal(address(["runs"]), "/api/runs");
});

test("the key is taken out of the hash", () => {
  assert.deepEqual(takeKey("#key=a%2Fb&/step/r/1"), { key: "a/b", rest: "#/step/r/1" });
  assert.deepEqual(takeKey("#key=a"), { key: "a", rest: "#/" });
  assert.deepEqual(takeKey("#/step/r/1"), { key: null, rest: "#/step/r/1" });
});

test("token windows begin at multiples", () => {
  assert.deepEqual(windowStarts(1999, 4001), [0, 2000, 4000]);
  assert.deepEqual(windowStarts(0, 0), []);
});
