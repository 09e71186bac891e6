import assert from "node:assert/strict";
import { test } from "node:test";
import { causePlaces, chartBounds } from "../../../../verl_server/watch/site/static/js/causes.js";
import { orderedSettings } from "../../../../verl_server/watch/site/static/js/runsettings.js";

const advisory = (/** @type {string} */ name, more = {}) => ({ name, step: 7, ended: null, bound: 0.5, ...more });

test("each advisory leads to what shows its cause, and to its step", () => {
  const first = (/** @type {string} */ name, more = {}) => causePlaces("a", advisory(name, more))[0].href;
  assert.equal(first("failed"), "#/find/a?error=1");
  assert.equal(first("failed", { ended: 9 }), "#/find/a?error=1&to=9");
  assert.equal(first("truncated"), "#/find/a?order=-tokens");
  assert.equal(first("groups_without_spread"), "#/step/a/7?sort=flat");
  assert.equal(first("behaviour_kl"), "#/?chart=kl");
  assert.equal(first("servers_idle"), "#/waits/a");
  assert.equal(first("of a later version"), "#/step/a/7");
  for (const name of ["failed", "groups_without_spread", "behaviour_kl", "slow_phase", "cache_hits"]) {
    const places = causePlaces("a", advisory(name));
    assert.ok(
      places.some(({ href }) => href.startsWith("#/step/a/7")),
      name,
    );
    assert.equal(new Set(places.map(({ title }) => title)).size, places.length);
  }
});

test("the bounds of charts are those of advisories that are true, in the unit of the chart", () => {
  const found = chartBounds([
    advisory("behaviour_kl", { bound: 1 }),
    advisory("behaviour_kl", { bound: 1 }),
    advisory("trainer_idle"),
    advisory("failed", { bound: 0.05 }),
    advisory("entropy_collapse", { ended: 9 }),
    advisory("logprob_gap", { bound: null }),
    advisory("unknown"),
  ]);
  assert.deepEqual(found, { kl: [1], idle: [0.5] });
});

test("settings that are named come first", () => {
  const settings = { steps: "8", "grpo.learning_rate": "0.4", agent: "null" };
  assert.deepEqual(orderedSettings(settings, ["grpo.learning_rate", "not there"]), [
    ["grpo.learning_rate", "0.4", true],
    ["agent", "null", false],
    ["steps", "8", false],
  ]);
});
