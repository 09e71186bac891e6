/**
 * The view Episode: the conversation of one trajectory, its tree of branches, its figures, and its tokens.
 *
 * `main` opens it for `#/episode/RUN/ROW?turn&colour`. The query has the turn in sight and the colour of the tokens.
 */

import { badge, emptyState, errorState, fill, foreign, h, loadingState } from "./dom.js";
import { Conversation } from "./conversation.js";
import { capital, counted, duration, figure, fixed, moment, placeName, shorten, whole, words } from "./format.js";
import { arrow, fact } from "./heads.js";
import { address, link } from "./places.js";
import { endTone } from "./rows.js";
import { TokenStrips } from "./tokens.js";
import { BranchTree } from "./tree.js";
import { waitStrip } from "./waitstrip.js";

const PAGES = 400;

/** @param {import("./main.js").Page} page @returns {import("./main.js").View} */
export function createEpisode(page) {
  return new EpisodeView(page);
}

class EpisodeView {
  /** @param {import("./main.js").Page} page */
  constructor(page) {
    this.page = page;
    this.head = h("div", { class: "episode-head" });
    this.side = h("aside", { class: "branches", hidden: true });
    this.talk = h("div", { class: "talk" }, loadingState("Loading the episode"));
    this.tokenPlace = h("div", { class: "token-place" });
    this.element = h(
      "div",
      { class: "page full episode" },
      this.head,
      h("div", { class: "episode-body" }, this.side, this.talk),
      this.tokenPlace,
    );
    this.run = "";
    this.row = "";
    /** @type {any} */
    this.answer = null;
    /** @type {Conversation | null} */
    this.conversation = null;
    /** @type {TokenStrips | null} */
    this.tokens = null;
    /** @type {BranchTree | null} */
    this.tree = null;
    this.isFolded = false;
  }

  destroy() {
    this.#clear();
    this.isGone = true;
  }

  #clear() {
    this.conversation?.destroy();
    this.tokens?.destroy();
    this.tree?.destroy();
    this.conversation = this.tokens = this.tree = null;
  }

  /** @param {import("./places.js").Place} place */
  async update(place) {
    const [run, row] = place.parts;
    this.query = place.query;
    if (this.run === run && this.row === row && this.answer) {
      this.tokens?.setColour(place.query.colour ?? "mask");
      if (place.query.turn) await this.#showTurn(Number(place.query.turn));
      return;
    }
    [this.run, this.row] = [run, row];
    const asked = (this.asked = {});
    const answer = await this.page.api.get(this.#url());
    if (this.isGone || asked !== this.asked) return;
    this.#clear();
    this.answer = answer;
    this.#drawHead();
    this.#drawTree();
    this.#drawTalk();
    this.#drawTokens();
    this.page.say(`episode ${answer.row.name}, reward ${figure(answer.row.reward)}`);
    if (place.query.turn) await this.#showTurn(Number(place.query.turn));
  }

  /** @param {string[]} rest @param {Record<string, any>} query */
  #url(rest = [], query = {}) {
    return address(["runs", this.run, "episodes", this.row, ...rest], query);
  }

  /** A link to another row that keeps the colour. @param {string} row */
  #to(row) {
    return link("episode", [this.run, row], { colour: this.query?.colour });
  }

  #drawHead() {
    const { row, siblings, attempts, trained, error, waits } = this.answer;
    const own = this.#place(siblings);
    const to = (/** @type {string | undefined} */ sibling) => (sibling === undefined ? null : this.#to(sibling));
    const stepName = capital(placeName(row.step));
    const others = attempts.filter((/** @type {string} */ each) => each !== row.row);
    const tone = row.fault === "infrastructure" ? "bad" : endTone(row.stop_reason, row.fault);
    fill(
      this.head,
      h(
        "div",
        { class: "view-head" },
        h(
          "a",
          {
            class: "up",
            href: link("step", [this.run, row.step], { group: row.group }),
            title: "The group in its step (u)",
          },
          stepName,
        ),
        arrow(to(siblings[own - 1]), "\u2039", "Previous episode of the group (k)"),
        h("h1", {}, `Episode ${row.name}`),
        arrow(to(own < 0 ? undefined : siblings[own + 1]), "\u203a", "Next episode of the group (j)"),
        siblings.length > 1 && own >= 0 ? h("span", { class: "muted" }, `${own + 1} of ${siblings.length}`) : null,
        row.stop_reason
          ? badge(words(row.stop_reason), tone, row.fault ? `fault: ${row.fault}` : null)
          : badge("unfinished", "warn"),
        row.lost ? badge("lost step", "past", "The run was killed, and the step ran again.") : null,
        row.replaced ? badge("replaced", "past", "Another attempt took its place.") : null,
        row.kind === "untrained" ? badge("untrained", "past", "The step was not completed.") : null,
        row.phase ? badge(`${row.phase}`, "") : null,
        others.length
          ? h(
              "span",
              { class: "muted" },
              "attempts: ",
              attempts.map((/** @type {string} */ each, /** @type {number} */ index) =>
                each === row.row ? ` ${index + 1} ` : h("a", { href: this.#to(each) }, ` ${index + 1} `),
              ),
            )
          : null,
        h("span", { class: "spacer" }),
        h("span", { class: "muted" }, row.began === null ? "" : moment(row.began)),
      ),
      h("div", { class: "facts" }, ...this.#facts(row, trained)),
      error ? h("div", { class: "error inline", role: "note" }, foreign(error)) : null,
      waits.length ? waitStrip(waits) : null,
    );
  }

  /** @param {any} row @param {any} trained */
  #facts(row, trained) {
    const { environment, resumes, versions, sampling_seed: seed } = this.answer;
    return [
      fact("reward", figure(row.reward)),
      trained ? fact("advantage", fixed(trained.advantage, 3)) : null,
      fact("turns", whole(row.turns)),
      fact("tokens", `${whole(row.tokens)}, ${whole(row.sampled)} sampled`),
      fact("generating", duration(row.generate_s)),
      fact("env wait", duration(row.env_s)),
      row.queue_s ? fact("queued", duration(row.queue_s)) : null,
      fact("log-probability", fixed(row.logprob, 3)),
      trained && trained.gap_mean !== null
        ? fact("gap", `${figure(trained.gap_mean, 2)}, at most ${figure(trained.gap_max, 2)}`)
        : null,
      trained ? fact("entropy", figure(trained.entropy)) : null,
      trained && trained.age !== null ? fact("age", String(trained.age)) : null,
      trained && trained.step !== row.step ? fact("trained in", `step ${trained.step}`) : null,
      fact(
        versions.length === 1 ? "version" : "versions",
        versions.length > 1
          ? `${versions.length}: ${shorten(versions[0], 18)} to ${shorten(versions.at(-1), 18)}`
          : shorten(versions[0] ?? "\u2013", 24),
      ),
      fact("seed", row.seed),
      seed ? fact("sampling seed", seed) : null,
      row.episode_id ? fact("task", shorten(row.episode_id, 32)) : null,
      resumes ? fact("resumed", counted(resumes, "generation")) : null,
      environment ? fact("environment", shorten(environment, 40)) : null,
    ].filter((each) => each !== null);
  }

  #drawTree() {
    const { tree } = this.answer;
    this.side.hidden = tree.length < 2;
    if (tree.length < 2) return;
    this.tree = new BranchTree(tree, this.row, (row) => this.#to(row));
    fill(this.side, h("h2", {}, counted(tree.length, "branch", "branches")), this.tree.list.element);
  }

  #drawTalk() {
    const { turns, source } = this.answer;
    if (!turns.length) {
      const why = source === "none" ? this.#noText() : "The episode ended before its first turn.";
      return void fill(this.talk, emptyState("No turns", why));
    }
    this.conversation = new Conversation({
      turns,
      next: this.answer.next,
      onMore: (after) => this.page.api.get(this.#url([], { after })),
      onText: (turn, part, start) => this.page.api.get(this.#url(["text"], { turn, part, start })),
      onTokens: (position, turn) => {
        this.#fold(false);
        this.page.replace(link("episode", [this.run, this.row], { ...this.query, turn }));
        void this.tokens?.scrollTo(position);
      },
      onTurns: (all) =>
        this.tokens?.setTurns(all.map((turn) => ({ turn: turn.number, read: turn.read, wrote: turn.wrote }))),
    });
    const note =
      source === "decoded"
        ? h("p", { class: "note" }, "Decoded from the tokens: these files have no messages.")
        : source === "none"
          ? h("p", { class: "note" }, this.#noText())
          : null;
    fill(this.talk, note, this.conversation.list.element);
    this.conversation.list.draw();
  }

  #noText() {
    const problem = this.page.run(this.run)?.tokenizer_problem;
    return `The files have no messages, and the tokens cannot be decoded. ${problem ?? "Name the tokenizer with --tokenizer."}`;
  }

  #drawTokens() {
    const { row, turns, versions } = this.answer;
    if (!row.tokens) return void fill(this.tokenPlace);
    const problem = this.page.run(this.run)?.tokenizer_problem;
    this.tokens = new TokenStrips({
      load: (start) => this.page.api.get(this.#url(["tokens"], { start }), { keep: true }),
      total: row.tokens,
      versions,
      colour: this.query?.colour ?? "mask",
      onColour: (colour) => {
        this.query = { ...this.query, colour: colour === "mask" ? "" : colour };
        this.page.replace(link("episode", [this.run, this.row], this.query));
        this.tokens?.setColour(colour);
        this.#drawHead();
      },
      onTurn: (turn) => void this.#showTurn(turn, false),
    });
    this.tokens.setTurns(
      turns.map((/** @type {any} */ turn) => ({ turn: turn.number, read: turn.read, wrote: turn.wrote })),
    );
    fill(this.tokenPlace, this.tokens.element);
    if (problem) this.tokens.element.title = problem;
    this.#fold(this.isFolded);
    this.tokens.draw();
  }

  /** Scroll the conversation to a turn, and the tokens too. @param {number} turn @param {boolean} [withTokens] */
  async #showTurn(turn, withTokens = true) {
    for (
      let page = 0;
      page < PAGES && this.conversation && !this.conversation.has(turn) && this.conversation.next !== null;
      page += 1
    )
      await this.conversation.more();
    const found = this.conversation?.show(turn);
    if (found && withTokens)
      await this.tokens?.scrollTo(found.wrote[0] < found.wrote[1] ? found.wrote[0] : found.read[0]);
  }

  /** Place of this episode among its siblings, whose rows are those of the first branches. @param {string[]} siblings */
  #place(siblings) {
    const rows = new Set([this.answer.row.row, ...this.answer.tree.map((/** @type {any} */ branch) => branch.row)]);
    return siblings.findIndex((row) => rows.has(row));
  }

  /** @param {boolean} isFolded */
  #fold(isFolded) {
    this.isFolded = isFolded;
    this.tokenPlace.classList.toggle("folded", isFolded);
    this.tokens?.draw();
  }

  /** @param {string} key */
  key(key) {
    if (!this.answer) return false;
    const { siblings, row } = this.answer;
    const own = this.#place(siblings);
    if (key === "j" || key === "k") {
      const to = own < 0 ? undefined : siblings[own + (key === "j" ? 1 : -1)];
      if (to) this.page.go(this.#to(to));
      else
        this.page.say(
          key === "j" ? "This is the last episode of the group." : "This is the first episode of the group.",
        );
    } else if (key === "n" || key === "p") {
      const turn = this.conversation?.step(key === "n" ? 1 : -1);
      if (turn) void this.tokens?.scrollTo(turn.wrote[0]);
    } else if (key === "c") this.tokens?.nextColour();
    else if (key === "t") this.#fold(!this.isFolded);
    else if (key === "u") this.page.go(link("step", [this.run, row.step], { group: row.group }));
    else return false;
    return true;
  }
}
