import assert from "node:assert/strict";
import { test } from "node:test";
import { orderedAdvisories } from "../../../../verl_server/watch/site/static/js/advisories.js";
import { EventParser } from "../../../../verl_server/watch/site/static/js/api.js";
import { conversationRows, isLong, prettyJson } from "../../../../verl_server/watch/site/static/js/conversation.js";
import { filtersOf, fits, sortedGroups } from "../../../../verl_server/watch/site/static/js/filters.js";
import { RowPlaces } from "../../../../verl_server/watch/site/static/js/list.js";
import { flatSettings } from "../../../../verl_server/watch/site/static/js/settings.js";
import { endTone, rewardRange } from "../../../../verl_server/watch/site/static/js/rows.js";
import { orderedTree } from "../../../../verl_server/watch/site/static/js/tree.js";

test("rows of any height have their places", () => {
  const places = new RowPlaces(10);
  places.resize(5);
  assert.equal(places.total, 50);
  places.measure(1, 30);
  assert.equal(places.top(2), 40);
  assert.deepEqual(
    [0, 9, 10, 39, 40, 999].map((at) => places.at(at)),
    [0, 0, 1, 1, 2, 4],
  );
  places.resize(2);
  assert.equal(places.total, 40);
  assert.equal(new RowPlaces(10).at(5), 0);
});

test("live events are read wherever their chunks are cut", () => {
  const stream = 'event: grown\r\ndata: {"run":"a"}\r\n\r\n: still here\n\ndata: {"run":\ndata: "b"}\n\n';
  for (const size of [1, 2, 3, 7, stream.length]) {
    const parser = new EventParser();
    const found = [];
    for (let at = 0; at < stream.length; at += size) found.push(...parser.push(stream.slice(at, at + size)));
    assert.deepEqual(
      found.map((data) => JSON.parse(data).run),
      ["a", "b"],
    );
  }
});

test("filters are those of the server", () => {
  const row = {
    reward: 0.5,
    tokens: 100,
    stop_reason: "done",
    fault: "policy",
    error: "",
    group: "g",
    phase: null,
    tools: ["search"],
    oldest_version: "1",
    newest_version: "2",
    step: 3,
    lost: false,
  };
  const passes = [
    {},
    { stop: "done" },
    { reward_from: "0.5" },
    { tokens_to: "100" },
    { tool: "search" },
    { version: "2" },
    { from: "3", to: "3" },
  ];
  const stops = [
    { stop: "env_error" },
    { reward_from: "0.6" },
    { error: "1" },
    { tool: "open" },
    { version: "3" },
    { from: "4" },
    { group: "h" },
  ];
  for (const filters of passes) assert.ok(fits(row, filters), JSON.stringify(filters));
  for (const filters of stops) assert.ok(!fits(row, filters), JSON.stringify(filters));
  assert.ok(!fits({ ...row, reward: null }, { reward_to: "1" }));
  assert.ok(!fits({ ...row, lost: true }, {}) && fits({ ...row, lost: true }, { lost: "1" }));
  assert.deepEqual(filtersOf({ stop: "done", sort: "mean", tool: "" }), { stop: "done" });
});

test("groups are sorted as by the server", () => {
  const groups = [
    { number: 0, spread: 0.1, mean: 1 },
    { number: 1, spread: null, mean: 3 },
    { number: 2, spread: 0.5, mean: 2 },
  ];
  const order = (sort) => sortedGroups(groups, sort).map(({ number }) => number);
  assert.deepEqual(order(""), [2, 0, 1]);
  assert.deepEqual(order("mean"), [1, 2, 0]);
  assert.deepEqual(order("number"), [0, 1, 2]);
});

test("rewards that are not finite leave the range alone", () => {
  assert.deepEqual(
    rewardRange([{ episodes: [{ reward: 1 }, { reward: "NaN" }, { reward: null }, { reward: -1 }] }, null]),
    [-1, 1],
  );
  assert.deepEqual(rewardRange([]), [0, 1]);
  assert.equal(endTone("env_error", "infrastructure"), "bad");
  assert.equal(endTone("done", "policy"), "");
});

test("parents come before their children, and circles end", () => {
  const tree = [
    { row: "c", parent: "b" },
    { row: "a", parent: null },
    { row: "b", parent: "a" },
    { row: "x", parent: "y" },
    { row: "y", parent: "x" },
  ];
  assert.deepEqual(
    orderedTree(tree).map(({ branch, depth }) => branch.row + depth),
    ["a0", "b1", "c2", "x0", "y1"],
  );
});

test("a conversation has a head for each turn, and folds what is long", () => {
  const part = (kind, text) => ({ kind, text, length: text.length, number: 0 });
  assert.deepEqual(
    conversationRows([
      { number: 0, parts: [part("text", "a")] },
      { number: 1, parts: [] },
    ]).map((row) => Boolean(row.part)),
    [false, true, false],
  );
  assert.ok(!isLong(part("text", "a".repeat(9999))));
  assert.ok(isLong(part("result", "a\n".repeat(9))));
  assert.ok(!isLong(part("call", '{"a": 1}')));
});

test("JSON is laid out only if nothing gets lost", () => {
  const long = JSON.stringify({ a: "x".repeat(100) });
  assert.equal(prettyJson(long, true), JSON.stringify(JSON.parse(long), null, 2));
  assert.equal(prettyJson('{"a":1}', true), '{"a":1}');
  for (const text of [long.replace('"x', '90071992547409931, "b": "x'), `${long}}`])
    assert.equal(prettyJson(text, true), text);
  assert.equal(prettyJson(long, false), long);
});

test("advisories: those that are still true first, then by severity, then the newest", () => {
  const one = (name, severity, step, ended = null) => ({ name, severity, step, ended });
  const advisories = [one("a", "notice", 9), one("b", "error", 1, 2), one("c", "warning", 3), one("d", "warning", 5)];
  assert.deepEqual(
    orderedAdvisories([{ run: { id: "r" }, answer: { advisories } }]).map(({ name }) => name),
    ["d", "c", "a", "b"],
  );
});

test("settings are flat texts", () => {
  assert.deepEqual(flatSettings({ a: { b: 1, c: null }, d: [1], e: "x" }), {
    "a.b": "1",
    "a.c": "null",
    d: "[1]",
    e: "x",
  });
});
