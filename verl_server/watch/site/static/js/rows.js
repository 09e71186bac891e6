/**
 * Rows of episodes and groups, which the views of steps, of comparisons and of found episodes share.
 */

import { rewardColour } from "./colours.js";
import { badge, canvasContext, foreign, h, isDark, styleValue } from "./dom.js";
import { duration, evaluatedStep, figure, fixed, toNumber, whole, words } from "./format.js";
import { link } from "./places.js";

const CELL = 9;
const STRIP_HEIGHT = 18;

/**
 * Return the tone of an end: a regular one has none.
 * @param {string | null} stop
 * @param {string | null} fault
 */
export function endTone(stop, fault) {
  if (stop === null || stop === "done") return "";
  if (["max_turns", "max_tokens", "context_full"].includes(stop)) return "warn";
  return fault === "policy" ? "warn" : "bad";
}

/**
 * The row of an episode, a link to it.
 * @param {string} run
 * @param {any} row `Row` in answers/steps.py.
 * @param {{isChild?: boolean, excerpt?: string}} [options]
 */
export function episodeLine(run, row, { isChild = false, excerpt = "" } = {}) {
  const tools = row.tools.slice(0, 3).join(", ") + (row.tools.length > 3 ? ` +${row.tools.length - 3}` : "");
  const notes = [
    row.replaced ? "replaced" : "",
    row.lost ? "lost step" : "",
    row.attempt ? `attempt ${row.attempt + 1}` : "",
    row.branches > 1 ? `${row.branches} branches` : "",
    row.versions > 1 ? `${row.versions} versions` : "",
    row.age ? `age ${row.age}` : "",
    row.kind === "untrained" ? row.kind : "",
    row.phase ?? "",
  ].filter(Boolean);
  const evaluated = evaluatedStep(row.step);
  const step =
    typeof row.step === "number" ? `step ${row.step}` : evaluated === null ? null : `held-out ${evaluated}`;
  return h(
    "a",
    {
      class: [
        "episode-line",
        isChild ? "child" : "",
        row.replaced || row.lost ? "past" : "",
        row.error && !excerpt ? "with-error" : "",
      ]
        .filter(Boolean)
        .join(" "),
      href: link("episode", [run, row.row]),
    },
    h(
      "span",
      { class: "name" },
      isChild ? row.name : `${step === null ? "" : `${step} \u00b7 `}${row.name}`,
    ),
    rewardText(row.reward),
    row.stop_reason ? badge(words(row.stop_reason), endTone(row.stop_reason, row.fault)) : badge("unfinished"),
    h("span", { class: "number", title: "turns" }, `${whole(row.turns)} ${row.turns === 1 ? "turn" : "turns"}`),
    h("span", { class: "number", title: `${row.sampled} sampled of ${row.tokens} tokens` }, `${whole(row.tokens)} tok`),
    h(
      "span",
      {
        class: "number",
        title: `generate ${duration(row.generate_s)}, environment ${duration(row.env_s)}, queue ${duration(row.queue_s)}`,
      },
      duration(row.generate_s + row.env_s + row.queue_s),
    ),
    h("span", { class: "number", title: "advantage" }, row.advantage === null ? "" : `adv ${fixed(row.advantage)}`),
    h(
      "span",
      { class: "rest" },
      foreign(
        excerpt || row.error || [row.answer, tools, ...notes].filter(Boolean).join(" \u00b7 "),
        excerpt ? "excerpt" : row.error ? "error-text" : "",
      ),
    ),
  );
}

/** @param {unknown} reward */
export function rewardText(reward) {
  return h("span", { class: "reward number", title: "reward" }, reward === null ? "\u2013" : figure(reward));
}

/**
 * Return the range of the rewards of groups, so that their strips have the same colours.
 * @param {any[]} groups
 * @returns {[number, number]}
 */
export function rewardRange(groups) {
  let low = Infinity;
  let high = -Infinity;
  for (const group of groups) {
    for (const row of group?.episodes ?? []) {
      const reward = toNumber(row.reward);
      if (reward === null || !Number.isFinite(reward)) continue;
      low = Math.min(low, reward);
      high = Math.max(high, reward);
    }
  }
  return low <= high ? [low, high] : [0, 1];
}

/**
 * Draw the rewards of a group as a strip: one cell an episode, its height and colour are the reward.
 * @param {any} group `Group` in answers/steps.py.
 * @param {[number, number]} range
 * @param {(row: string) => void} onOpen
 */
export function rewardStrip(group, [low, high], onOpen) {
  const rows = group.episodes.filter((/** @type {any} */ row) => !row.replaced);
  const cell = Math.max(2, Math.min(CELL, Math.floor(220 / Math.max(1, rows.length))));
  const canvas = h("canvas", {
    class: "strip",
    role: "img",
    "aria-label": `rewards: ${rows.map((/** @type {any} */ row) => figure(row.reward)).join(", ")}`,
  });
  const context = canvasContext(canvas, Math.max(1, cell * rows.length), STRIP_HEIGHT);
  const dark = isDark();
  const failed = styleValue("--bad");
  rows.forEach((/** @type {any} */ row, /** @type {number} */ index) => {
    const reward = toNumber(row.reward);
    const x = index * cell;
    if (reward === null || !Number.isFinite(reward)) {
      context.fillStyle = failed;
      context.fillRect(x + cell / 2 - 1, STRIP_HEIGHT - 5, 2, 5);
      return;
    }
    const share = high > low ? (reward - low) / (high - low) : reward > 0 ? 1 : 0.4;
    const height = 3 + share * (STRIP_HEIGHT - 3);
    context.fillStyle = rewardColour(reward, low, high, dark);
    context.fillRect(x, STRIP_HEIGHT - height, Math.max(1, cell - 1), height);
  });
  canvas.addEventListener("mousemove", (/** @type {MouseEvent} */ event) => {
    const row = rows[Math.floor(event.offsetX / cell)];
    canvas.title = row ? `${row.name}: reward ${figure(row.reward)}, ${words(row.stop_reason ?? "unfinished")}` : "";
  });
  canvas.addEventListener("click", (/** @type {MouseEvent} */ event) => {
    const row = rows[Math.floor(event.offsetX / cell)];
    if (!row) return;
    event.stopPropagation();
    event.preventDefault();
    onOpen(row.row);
  });
  return canvas;
}

/**
 * Return the ends of a group in words: nothing if all ended regularly.
 * @param {Record<string, number>} ends
 */
export function endsText(ends) {
  return Object.entries(ends)
    .filter(([end]) => end !== "done")
    .map(([end, count]) => `${count} ${words(end)}`)
    .join(", ");
}
