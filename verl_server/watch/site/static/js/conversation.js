/**
 * `Conversation`: the turns of an episode as a list of messages, calls, reasoning and results.
 *
 * `episode` owns one. Calls, results and reasoning that are long are folded; long texts are asked for in pieces. The
 * list keeps what is in sight alone in the document, and the conversation keeps what the reader has opened.
 */

import { badge, errorState, fill, foreign, h } from "./dom.js";
import { duration, figure, fixed, oneLine, shorten, toNumber, whole, words } from "./format.js";
import { WindowedList } from "./list.js";

const FOLDED_LINES = 6;
const FOLDED_CHARACTERS = 500;
/** A JSON text that is shorter stays on one line. */
const SHORT_JSON = 100;
/** @type {Record<string, string>} */
const ROLE_NAMES = {
  environment: "environment",
  policy: "policy",
  assistant: "policy",
  tool: "tool",
  user: "user",
  system: "system",
};

/**
 * Return true if a part is folded when it is first seen.
 * @param {any} part `Part` of answers/episode.py.
 */
export function isLong(part) {
  if (part.kind === "text") return false;
  return part.length > FOLDED_CHARACTERS || part.text.split("\n", FOLDED_LINES + 1).length > FOLDED_LINES;
}

/**
 * Return the rows of turns: a head for each turn, then its parts.
 * @param {any[]} turns `Turn` of answers/episode.py.
 */
export function conversationRows(turns) {
  return turns.flatMap((turn) => [
    { turn, part: null },
    ...turn.parts.map((/** @type {any} */ part) => ({ turn, part })),
  ]);
}

export class Conversation {
  /**
   * @param {object} options
   * @param {any[]} options.turns The first page of turns.
   * @param {number | null} options.next
   * @param {(after: number) => Promise<any>} options.onMore Returns the next `Episode` answer.
   * @param {(turn: number, part: number, start: number) => Promise<any>} options.onText Returns a `TextPart`.
   * @param {(position: number, turn: number) => void} options.onTokens The reader asks for the tokens of a turn.
   * @param {(turns: any[]) => void} options.onTurns More turns are known.
   */
  constructor({ turns, next, onMore, onText, onTokens, onTurns }) {
    this.turns = turns;
    this.next = next;
    this.onMore = onMore;
    this.onText = onText;
    this.onTokens = onTokens;
    this.onTurns = onTurns;
    /** @type {Map<string, boolean>} */
    this.unfolded = new Map();
    /** @type {Map<string, {text: string, next: number | null}>} */
    this.texts = new Map();
    this.current = -1;
    this.list = new WindowedList({
      label: "Conversation",
      guess: 56,
      className: "conversation",
      render: (item) => (item.part ? this.#part(item) : this.#head(item.turn)),
      onEnd: () => void this.more(),
    });
    this.items = conversationRows(turns);
    this.list.setItems(this.items);
  }

  destroy() {
    this.list.destroy();
  }

  /** @param {number} turn */
  has(turn) {
    return this.turns.some(({ number }) => number === turn);
  }

  async more() {
    if (this.next === null || this.isLoading) return;
    this.isLoading = true;
    const after = this.next;
    try {
      const answer = await this.onMore(after);
      this.turns = [...this.turns, ...answer.turns];
      this.next = answer.next;
      this.items = [...this.items, ...conversationRows(answer.turns)];
      this.list.setItems(this.items);
      this.onTurns(this.turns);
    } catch (error) {
      this.next = null;
      this.list.element.after(errorState(error));
    } finally {
      this.isLoading = false;
    }
  }

  /** Scroll to a turn and return it. @param {number} number */
  show(number) {
    const index = this.items.findIndex(({ turn, part }) => part === null && turn.number === number);
    if (index < 0) return null;
    this.current = number;
    this.list.select(index, { align: "start" });
    return this.items[index].turn;
  }

  /** Go to the next or previous turn. @param {number} by */
  step(by) {
    const first = this.turns[0]?.number ?? 0;
    const last = this.turns.at(-1)?.number ?? 0;
    return this.show(Math.min(last, Math.max(first, this.current < first ? first : this.current + by)));
  }

  /** @param {any} turn */
  #head(turn) {
    const { spans, read, wrote } = turn;
    const total = (/** @type {string} */ kind) =>
      spans
        .filter((/** @type {any[]} */ [name]) => name === kind)
        .reduce((/** @type {number} */ sum, /** @type {any[]} */ [, from, to]) => sum + to - from, 0);
    const times = ["generate", "env", "queue"]
      .filter((kind) => total(kind) > 0)
      .map((kind) => `${kind === "env" ? "environment" : kind} ${duration(total(kind))}`);
    const settings = Object.entries(turn.sampling)
      .map(([name, value]) => `${name}: ${oneLine(JSON.stringify(value) ?? "", 80)}`)
      .join("\n");
    const overridden = Object.keys(turn.overridden);
    const tokens = h(
      "button",
      {
        type: "button",
        class: "quiet tokens-link",
        title: "Scroll the tokens to this turn",
        on: { click: () => this.onTokens(wrote[0] < wrote[1] ? wrote[0] : read[0], turn.number) },
      },
      `${whole(read[1] - read[0])} read, ${whole(wrote[1] - wrote[0])} sampled`,
    );
    return h(
      "div",
      { class: "turn-head" },
      h("h3", {}, `Turn ${turn.number}`),
      tokens,
      toNumber(turn.logprob) === null
        ? null
        : h("span", { title: "mean log-probability of the sampled tokens" }, `logp ${fixed(turn.logprob)}`),
      toNumber(turn.reward) === null ? null : h("span", {}, "reward ", h("b", {}, figure(turn.reward))),
      turn.finish_reason && turn.finish_reason !== "stop"
        ? badge(words(turn.finish_reason), turn.finish_reason === "length" ? "warn" : "")
        : null,
      turn.versions.length > 1 ? badge(`${turn.versions.length} versions`, "info", turn.versions.join(", ")) : null,
      settings ? h("span", { class: "muted", title: settings }, "sampling") : null,
      overridden.length
        ? badge("overridden", "warn", `The session forces other values: ${overridden.join(", ")}`)
        : null,
      h("span", { class: "spacer" }),
      h("span", { class: "muted" }, times.join(" \u00b7 ")),
    );
  }

  /** @param {{turn: any, part: any}} item */
  #part(item) {
    const { turn, part } = item;
    const key = `${turn.number}:${part.number}`;
    const isFolded = this.unfolded.has(key) ? !this.unfolded.get(key) : isLong(part);
    const role = ROLE_NAMES[part.role] ?? part.role;
    const side = role === "policy" ? "policy" : "other";
    const verb = part.kind === "call" ? "calls" : part.kind === "reasoning" ? "thinks" : null;
    const name = part.name ? [" ", h("code", {}, foreign(shorten(part.name, 60)))] : [];
    const title = h(
      "span",
      { class: "part-role" },
      verb ?? foreign(role),
      name,
      part.kind === "result" ? " result" : "",
    );
    const canFold = part.kind !== "text" || part.length > 4 * FOLDED_CHARACTERS;
    const head = canFold
      ? h(
          "button",
          {
            type: "button",
            class: "part-head",
            "aria-expanded": !isFolded,
            on: { click: () => this.#toggle(key, isFolded, item) },
          },
          h("span", { class: "fold", "aria-hidden": "true" }, isFolded ? "\u25b8" : "\u25be"),
          title,
          isFolded ? h("span", { class: "preview" }, foreign(oneLine(part.text, 160))) : null,
        )
      : h("div", { class: "part-head" }, title);
    return h("article", { class: `part ${side} ${part.kind}` }, head, isFolded ? null : this.#text(key, turn, part));
  }

  /** @param {string} key @param {any} turn @param {any} part */
  #text(key, turn, part) {
    const { text: known, next } = this.texts.get(key) ?? part;
    const shown = part.kind === "call" || part.kind === "data" ? prettyJson(known, next === null) : known;
    const text = h(
      "pre",
      { class: "part-text", dir: "auto" },
      shown === "" ? h("span", { class: "muted" }, "empty") : foreign(shown),
    );
    if (next === null) return text;
    const rest = h(
      "button",
      { type: "button", class: "more" },
      `Show more: ${whole(part.length - next)} of ${whole(part.length)} characters are left`,
    );
    rest.addEventListener("click", async () => {
      rest.disabled = true;
      try {
        const answer = await this.onText(turn.number, part.number, next);
        this.texts.set(key, { text: known + answer.text, next: answer.next });
        this.list.refreshRow(this.items.findIndex((item) => item.turn === turn && item.part === part));
      } catch (error) {
        fill(rest, /** @type {any} */ (error).message);
      }
    });
    return h("div", {}, text, rest);
  }

  /** @param {string} key @param {boolean} isFolded @param {any} item */
  #toggle(key, isFolded, item) {
    this.unfolded.set(key, isFolded);
    const index = this.items.indexOf(item);
    this.list.refreshRow(index);
    /** @type {HTMLElement | null | undefined} */ (this.list.rowOf(index)?.querySelector("button.part-head"))?.focus({
      preventScroll: true,
    });
  }
}

/**
 * Return a JSON text on several lines if it is one, else the text itself.
 * @param {string} text
 * @param {boolean} isWhole False for the beginning of a longer text.
 */
export function prettyJson(text, isWhole) {
  if (!isWhole || text.length < SHORT_JSON || text.length > 20000 || !/^\s*[[{]/.test(text)) return text;
  try {
    const value = JSON.parse(text);
    const pretty = JSON.stringify(value, null, 2);
    return /\d{16,}/.test(text) ? text : pretty; // long numbers would lose digits
  } catch {
    return text;
  }
}
