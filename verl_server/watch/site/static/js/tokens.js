/**
 * `TokenStrips`: the tokens of a trajectory on a canvas, coloured by a figure, with what the pointer is over.
 *
 * `episode` owns one. Tokens come in windows of 2,000, which are asked for when they come in sight: 128,000 tokens cost
 * no more than those on the screen. The heights of windows that were not in sight are guessed.
 */

import { TOKEN_COLOURS, tokenColour } from "./colours.js";
import { canvasContext, fill, foreign, h, isDark, styleValue } from "./dom.js";
import { whole } from "./format.js";
import { RowPlaces } from "./list.js";
import { TOKEN_WINDOW } from "./places.js";
import { LINE, MARGIN, drawTokens, tokenFacts } from "./tokendrawing.js";
import { layoutTokens, tokenAt } from "./tokenlayout.js";

const PADDING = 6;
const GUESSED_TOKENS = 22;

export class TokenStrips {
  /**
   * @param {object} options
   * @param {(start: number) => Promise<any>} options.load Returns the window `Tokens` that begins at `start`.
   * @param {number} options.total Number of tokens.
   * @param {string[]} options.versions All versions, the oldest first.
   * @param {string} options.colour Name in `TOKEN_COLOURS`.
   * @param {(colour: string) => void} options.onColour
   * @param {(turn: number) => void} options.onTurn The reader chose a token of this turn.
   */
  constructor({ load, total, versions, colour, onColour, onTurn }) {
    this.load = load;
    this.total = total;
    this.versions = new Map(versions.map((version, index) => [version, index]));
    this.colour = TOKEN_COLOURS.some(({ name }) => name === colour) ? colour : "mask";
    this.onColour = onColour;
    this.onTurn = onTurn;
    /** @type {Map<number, {window: any, layout: import("./tokenlayout.js").Layout, width: number}>} */
    this.blocks = new Map();
    /** @type {Set<number>} */
    this.asked = new Set();
    /** @type {Map<string, number>} */
    this.measured = new Map();
    this.places = new RowPlaces(Math.ceil(TOKEN_WINDOW / GUESSED_TOKENS) * LINE);
    this.places.resize(Math.ceil(total / TOKEN_WINDOW));
    if (total % TOKEN_WINDOW)
      this.places.measure(this.places.heights.length - 1, Math.ceil((total % TOKEN_WINDOW) / GUESSED_TOKENS) * LINE);
    this.pointed = -1;
    this.chosen = -1;
    /** @type {any} */
    this.problem = null;
    /** @type {{turn: number, read: number[], wrote: number[]}[]} */
    this.turns = [];
    this.#makeElements();
    this.sizes = new ResizeObserver(() => this.#resized());
    this.sizes.observe(this.scroller);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.recolour = () => {
      this.#drawLegend();
      this.draw();
    };
    this.scheme.addEventListener("change", this.recolour);
  }

  destroy() {
    this.sizes.disconnect();
    this.scheme.removeEventListener("change", this.recolour);
    this.isGone = true;
  }

  #makeElements() {
    this.canvas = h("canvas", {
      class: "token-canvas",
      role: "img",
      tabindex: "0",
      "aria-label": `${whole(this.total)} tokens. Arrow keys choose one.`,
    });
    this.inner = h("div", { class: "token-inner" }, this.canvas);
    this.scroller = h("div", { class: "token-scroll" }, this.inner);
    this.map = h("canvas", {
      class: "token-map",
      role: "img",
      "aria-label": "All tokens: where the policy wrote",
      title: "All tokens: blue is what the policy wrote. Click to go there.",
    });
    this.mapBox = h("div", { class: "token-map-box" }, this.map);
    this.readout = h("div", { class: "token-readout", role: "status" });
    this.legend = h("div", { class: "legend" });
    this.choice = h("div", { class: "choice", role: "radiogroup", "aria-label": "Colour of the tokens" });
    this.element = h(
      "section",
      { class: "tokens", "aria-label": "Tokens" },
      h("div", { class: "token-head" }, h("h2", {}, "Tokens"), this.choice, this.legend),
      this.readout,
      this.mapBox,
      this.scroller,
    );
    this.scroller.addEventListener("scroll", () => this.draw(), { passive: true });
    this.canvas.addEventListener("mousemove", (/** @type {MouseEvent} */ event) =>
      this.#point(this.#tokenUnder(event)),
    );
    this.canvas.addEventListener("mouseleave", () => this.#point(-1));
    this.canvas.addEventListener("click", (/** @type {MouseEvent} */ event) => this.#choose(this.#tokenUnder(event)));
    this.canvas.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => this.#key(event));
    this.map.addEventListener(
      "click",
      (/** @type {MouseEvent} */ event) =>
        void this.scrollTo(Math.floor((event.offsetX / this.map.clientWidth) * this.total)),
    );
    this.#drawChoice();
    this.#drawLegend();
    this.#read();
  }

  /** @param {string} colour */
  setColour(colour) {
    if (!TOKEN_COLOURS.some(({ name }) => name === colour) || colour === this.colour) return;
    this.colour = colour;
    this.#drawChoice();
    this.#drawLegend();
    this.draw();
  }

  nextColour() {
    const index = TOKEN_COLOURS.findIndex(({ name }) => name === this.colour);
    this.onColour(TOKEN_COLOURS[(index + 1) % TOKEN_COLOURS.length].name);
  }

  /** Tell where the turns lie, for the map. @param {{turn: number, read: number[], wrote: number[]}[]} turns */
  setTurns(turns) {
    this.turns = turns;
    this.#drawMap();
  }

  /** Scroll to a token. @param {number} position */
  async scrollTo(position) {
    const at = Math.min(this.total - 1, Math.max(0, position));
    const index = Math.floor(at / TOKEN_WINDOW);
    const goal = (this.goal = {});
    for (let pass = 0; pass < 3; pass += 1) {
      await this.#ask(index);
      if (this.goal !== goal || this.isGone) return;
      const block = this.#block(index);
      if (!block) return;
      const top = this.places.top(index) + block.layout.line[at % TOKEN_WINDOW] * LINE;
      this.scroller.scrollTop = Math.max(0, top - LINE);
      this.draw();
    }
  }

  #drawChoice() {
    const buttons = TOKEN_COLOURS.map(({ name, title, hint }) =>
      h(
        "button",
        {
          type: "button",
          role: "radio",
          "aria-checked": name === this.colour,
          title: hint,
          on: { click: () => this.onColour(name) },
        },
        title,
      ),
    );
    fill(this.choice, buttons);
  }

  #drawLegend() {
    const dark = isDark();
    const entry = (/** @type {string | null} */ colour, /** @type {any} */ text) =>
      h(
        "span",
        { class: "legend-entry" },
        h("i", { class: "swatch", style: { background: colour ?? "transparent" } }),
        text,
      );
    const found = TOKEN_COLOURS.find(({ name }) => name === this.colour);
    const versions = [...this.versions]
      .slice(-6)
      .map(([version, index]) => entry(tokenColour("version", index, dark), foreign(version)));
    const more =
      this.versions.size > 6 ? h("span", { class: "muted" }, `and ${this.versions.size - 6} older ones`) : null;
    const entries =
      this.colour === "version"
        ? [...versions, more]
        : found?.legend.map(([text, value]) => entry(tokenColour(this.colour, Number(value), dark), text));
    fill(this.legend, entries ?? []);
    this.legend.title = found?.hint ?? "";
  }

  /** Ask for a window, and lay it out. @param {number} index */
  async #ask(index) {
    if (this.blocks.has(index) || index < 0 || index * TOKEN_WINDOW >= this.total) return;
    if (this.asked.has(index)) return;
    this.asked.add(index);
    try {
      const window = await this.load(index * TOKEN_WINDOW);
      if (this.isGone) return;
      this.problem = null;
      this.#keep(index, window);
    } catch (error) {
      this.problem = error;
    } finally {
      this.asked.delete(index);
      if (!this.isGone && !this.problem) this.draw();
      else if (this.problem) this.#drawProblem();
    }
  }

  /** Lay a window out without moving what is in sight. @param {number} index @param {any} window */
  #keep(index, window) {
    const { scrollTop } = this.scroller;
    const anchor = this.places.at(scrollTop);
    const inAnchor = scrollTop - this.places.top(anchor);
    const layout = this.#layout(window);
    this.blocks.set(index, { window, layout, width: this.#lineWidth });
    this.places.measure(index, layout.lines * LINE + PADDING);
    this.inner.style.height = `${this.places.total}px`;
    if (index < anchor) this.scroller.scrollTop = this.places.top(anchor) + inAnchor;
  }

  get #lineWidth() {
    return Math.max(80, this.scroller.clientWidth - MARGIN - 12);
  }

  /** @param {any} window */
  #layout(window) {
    const context = /** @type {CanvasRenderingContext2D} */ (this.canvas.getContext("2d"));
    context.font = this.font;
    const measure = (/** @type {string} */ text) => {
      let width = this.measured.get(text);
      if (width === undefined) {
        width = context.measureText(text).width;
        if (this.measured.size > 50000) this.measured.clear();
        this.measured.set(text, width);
      }
      return width;
    };
    return layoutTokens(window, this.#lineWidth, measure);
  }

  get font() {
    return `12.5px ${styleValue("--mono")}`;
  }

  /** The laid-out window, laid out again if the width has changed. @param {number} index */
  #block(index) {
    const block = this.blocks.get(index);
    if (block && block.width !== this.#lineWidth) this.#keep(index, block.window);
    return this.blocks.get(index);
  }

  #resized() {
    this.inner.style.height = `${this.places.total}px`;
    this.#drawMap();
    this.draw();
  }

  draw() {
    const { clientWidth: width, clientHeight: height, scrollTop } = this.scroller;
    if (!width || !height || this.isGone || !this.total) return;
    this.inner.style.height = `${this.places.total}px`;
    const context = canvasContext(this.canvas, width, height);
    this.canvas.style.transform = `translateY(${scrollTop}px)`;
    const first = this.places.at(scrollTop);
    const last = this.places.at(scrollTop + height);
    context.textBaseline = "middle";
    const { colour, versions, pointed, chosen, font } = this;
    const picture = { colour, versions, pointed, chosen, font };
    for (let index = first; index <= last; index += 1) {
      const block = this.#block(index);
      const top = this.places.top(index) - scrollTop;
      if (block) drawTokens(context, block, { top, height, ...picture });
      else this.#drawWanted(context, index, top, height);
    }
    for (const near of [last + 1, first - 1]) void this.#askSoon(near);
    this.#drawMap();
  }

  /** @param {CanvasRenderingContext2D} context @param {number} index @param {number} top @param {number} height */
  #drawWanted(context, index, top, height) {
    context.font = `12px ${styleValue("--sans")}`;
    context.fillStyle = styleValue("--muted");
    const end = Math.min(this.total, (index + 1) * TOKEN_WINDOW);
    const y = Math.min(Math.max(top, 0) + LINE, height - LINE);
    context.fillText(`tokens ${whole(index * TOKEN_WINDOW)} to ${whole(end)} are on their way`, MARGIN, y);
    void this.#askSoon(index);
  }

  /** Ask for a window if it is still wanted after a moment: fast scrolling asks for nothing. @param {number} index */
  async #askSoon(index) {
    if (
      this.blocks.has(index) ||
      this.asked.has(index) ||
      index < 0 ||
      index * TOKEN_WINDOW >= this.total ||
      this.problem
    )
      return;
    await new Promise((resolve) => setTimeout(resolve, this.blocks.size ? 60 : 0));
    const { scrollTop, clientHeight } = this.scroller;
    const isNear = index >= this.places.at(scrollTop) - 1 && index <= this.places.at(scrollTop + clientHeight) + 1;
    if (isNear && !this.isGone) await this.#ask(index);
  }

  #drawMap() {
    const width = this.mapBox.clientWidth;
    if (!width || !this.total) return;
    const context = canvasContext(this.map, width, 10);
    context.fillStyle = styleValue("--grid");
    context.fillRect(0, 2, width, 6);
    context.fillStyle = tokenColour("mask", 1, isDark()) ?? "";
    for (const { wrote } of this.turns) {
      const from = (wrote[0] / this.total) * width;
      context.fillRect(from, 2, Math.max(0.6, ((wrote[1] - wrote[0]) / this.total) * width), 6);
    }
    const { scrollTop, clientHeight, scrollHeight } = this.scroller;
    context.strokeStyle = styleValue("--ink");
    const [from, to] = [scrollTop, scrollTop + clientHeight].map((at) => this.#shareAt(at, scrollHeight) * width);
    context.strokeRect(Math.min(width - 4, from) + 0.5, 0.5, Math.max(3, to - from - 1), 9);
  }

  /** Share of the tokens above a height. @param {number} at @param {number} height */
  #shareAt(at, height) {
    if (at >= height) return 1;
    const index = this.places.at(at);
    const size = Math.min(TOKEN_WINDOW, this.total - index * TOKEN_WINDOW);
    const inside = Math.min(1, (at - this.places.top(index)) / (this.places.heights[index] || 1));
    return Math.min(1, (index * TOKEN_WINDOW + inside * size) / this.total);
  }

  #drawProblem() {
    fill(
      this.readout,
      h("span", { class: "bad-text" }, foreign(this.problem.message), " "),
      h(
        "button",
        {
          type: "button",
          on: {
            click: () => {
              this.problem = null;
              this.#read();
              this.draw();
            },
          },
        },
        "Try again",
      ),
    );
  }

  /** @param {MouseEvent} event */
  #tokenUnder(event) {
    const y = this.scroller.scrollTop + event.offsetY;
    const index = this.places.at(y);
    const block = this.blocks.get(index);
    if (!block) return -1;
    const found = tokenAt(block.layout, event.offsetX - MARGIN, Math.floor((y - this.places.top(index)) / LINE));
    return found < 0 ? -1 : index * TOKEN_WINDOW + found;
  }

  /** @param {number} position */
  #point(position) {
    if (position === this.pointed) return;
    this.pointed = position;
    this.draw();
    this.#read();
  }

  /** @param {number} position */
  #choose(position) {
    this.chosen = position;
    this.draw();
    this.#read();
    const block = position >= 0 ? this.blocks.get(Math.floor(position / TOKEN_WINDOW)) : null;
    const turn = block?.window.turn[position % TOKEN_WINDOW];
    if (turn !== undefined && turn >= 0) this.onTurn(turn);
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const next = Math.min(
      this.total - 1,
      Math.max(0, this.chosen < 0 ? this.places.at(this.scroller.scrollTop) * TOKEN_WINDOW : this.chosen + by),
    );
    this.chosen = next;
    const block = this.blocks.get(Math.floor(next / TOKEN_WINDOW));
    const top = block
      ? this.places.top(Math.floor(next / TOKEN_WINDOW)) + block.layout.line[next % TOKEN_WINDOW] * LINE
      : -1;
    if (top < this.scroller.scrollTop || top > this.scroller.scrollTop + this.scroller.clientHeight - LINE)
      void this.scrollTo(next);
    this.draw();
    this.#read();
  }

  /** Tell the figures of the token under the pointer, or of the chosen one. */
  #read() {
    const position = this.pointed >= 0 ? this.pointed : this.chosen;
    const block = position >= 0 ? this.blocks.get(Math.floor(position / TOKEN_WINDOW)) : null;
    if (!block)
      return void fill(
        this.readout,
        h("span", { class: "muted" }, "Point at a token to see its figures; click it to go to its turn."),
      );
    const index = position % TOKEN_WINDOW;
    fill(this.readout, ...tokenFacts(block.window, index));
  }
}
