/**
 * `WindowedList`: shows the part of a long list that is in sight, so that the document stays small.
 *
 * Groups, episodes, conversations and trees are such lists. Rows have any height: a height is guessed until its row has
 * been in sight once. When a guess was wrong, the rows in sight stay where they are.
 */

import { h } from "./dom.js";

const BEYOND = 300;

/** The places of rows of different heights. Pure: it knows numbers alone. */
export class RowPlaces {
  /** @param {number} guess Height of a row that was not measured. */
  constructor(guess) {
    this.guess = guess;
    /** @type {number[]} */
    this.heights = [];
    /** @type {number[]} */
    this.tops = [0];
    this.valid = 0;
  }

  /** @param {number} count */
  resize(count) {
    while (this.heights.length < count) this.heights.push(this.guess);
    this.heights.length = count;
    this.valid = Math.min(this.valid, count);
  }

  /**
   * @param {number} index
   * @param {number} height
   */
  measure(index, height) {
    this.heights[index] = height;
    this.valid = Math.min(this.valid, index);
  }

  /** Return the distance from the top of the list to the row at `index`, or to the end of the list. */
  top(/** @type {number} */ index) {
    for (; this.valid < index; this.valid += 1)
      this.tops[this.valid + 1] = this.tops[this.valid] + this.heights[this.valid];
    return this.tops[index];
  }

  get total() {
    return this.top(this.heights.length);
  }

  /** Return the index of the row at a distance from the top. */
  at(/** @type {number} */ distance) {
    this.top(this.heights.length);
    let low = 0;
    let high = Math.max(0, this.heights.length - 1);
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.tops[middle] <= distance) low = middle;
      else high = middle - 1;
    }
    return low;
  }
}

export class WindowedList {
  /**
   * @param {object} options
   * @param {string} options.label Name of the list for screen readers.
   * @param {(item: any, index: number) => HTMLElement} options.render Makes the row of an item.
   * @param {number} [options.guess] Likely height of a row.
   * @param {() => void} [options.onEnd] Called when the last row comes in sight.
   * @param {(index: number) => void} [options.onSelect]
   * @param {(first: number) => void} [options.onScroll] Called with the index of the first row in sight.
   * @param {string} [options.className]
   */
  constructor({
    label,
    render,
    guess = 40,
    onEnd = () => {},
    onSelect = () => {},
    onScroll = () => {},
    className = "",
  }) {
    this.render = render;
    this.onEnd = onEnd;
    this.onSelect = onSelect;
    this.onScroll = onScroll;
    /** @type {any[]} */
    this.items = [];
    this.places = new RowPlaces(guess);
    /** @type {Map<number, HTMLElement>} */
    this.rows = new Map();
    this.selected = -1;
    this.inner = h("div", { class: "list-inner", role: "list", "aria-label": label });
    this.element = h(
      "div",
      { class: `list ${className}`, tabindex: "0", "aria-label": label, role: "group" },
      this.inner,
    );
    this.element.addEventListener("scroll", () => this.draw(), { passive: true });
    this.sizes = new ResizeObserver(() => this.#resized());
    this.sizes.observe(this.element);
    this.rowSizes = new ResizeObserver((entries) => this.#measured(entries));
    this.width = 0;
  }

  destroy() {
    this.sizes.disconnect();
    this.rowSizes.disconnect();
  }

  /**
   * Show other items. Rows whose items are the same objects keep their elements and heights.
   * @param {any[]} items
   */
  setItems(items) {
    const old = this.items;
    this.items = items;
    this.places.resize(items.length);
    for (const [index, row] of this.rows) {
      if (items[index] !== old[index]) this.#drop(index, row);
    }
    this.draw();
  }

  /** Make all rows in sight again, for example after a change of their state. */
  refresh() {
    for (const [index, row] of this.rows) this.#drop(index, row);
    this.draw();
  }

  /** @param {number} index */
  refreshRow(index) {
    const row = this.rows.get(index);
    if (row) this.#drop(index, row);
    this.draw();
  }

  /**
   * Bring a row into sight and mark it.
   * @param {number} index
   * @param {{align?: "nearest" | "start"}} [options]
   */
  select(index, { align = "nearest" } = {}) {
    if (!this.items.length) return;
    const next = Math.min(this.items.length - 1, Math.max(0, index));
    this.rows.get(this.selected)?.removeAttribute("aria-current");
    this.selected = next;
    this.reveal(next, align);
    this.rows.get(next)?.setAttribute("aria-current", "true");
    this.onSelect(next);
  }

  /**
   * Select the next row at "j", the one before at "k". Return true if the key is one of them.
   * @param {string} key
   */
  key(key) {
    if (key !== "j" && key !== "k") return false;
    this.select(this.selected + (key === "j" ? 1 : -1));
    return true;
  }

  /**
   * @param {number} index
   * @param {"nearest" | "start"} [align]
   */
  reveal(index, align = "nearest") {
    for (let pass = 0; pass < 3; pass += 1) {
      // the rows above are measured on the way, which moves the goal
      const top = this.places.top(index);
      const bottom = this.places.top(index + 1);
      const { scrollTop, clientHeight } = this.element;
      if (align === "start" || top < scrollTop) this.element.scrollTop = top;
      else if (bottom > scrollTop + clientHeight) this.element.scrollTop = Math.min(top, bottom - clientHeight);
      this.draw();
    }
  }

  /** @returns {HTMLElement | undefined} The element of a row in sight. */
  rowOf(/** @type {number} */ index) {
    return this.rows.get(index);
  }

  draw() {
    const height = this.element.clientHeight;
    if (!height) return;
    const anchor = this.places.at(this.element.scrollTop);
    const shift = this.element.scrollTop - this.places.top(anchor);
    for (let pass = 0; pass < 4 && this.#drawOnce(height); pass += 1) {
      const top = this.places.top(anchor) + shift;
      if (Math.abs(top - this.element.scrollTop) >= 1) this.element.scrollTop = top;
    }
    this.onScroll(this.places.at(this.element.scrollTop + 1));
    const last = this.places.at(this.element.scrollTop + height + BEYOND);
    if (this.items.length && last >= this.items.length - 1) this.onEnd();
  }

  /** Make and drop rows; return true if a height was another one than the guess. @param {number} height */
  #drawOnce(height) {
    const { scrollTop } = this.element;
    const first = this.places.at(Math.max(0, scrollTop - BEYOND));
    const last = this.items.length ? this.places.at(scrollTop + height + BEYOND) : -1;
    for (const [index, row] of this.rows) {
      const isFar = index < first || index > last;
      if (isFar && !(row.contains(document.activeElement) && index < this.items.length)) this.#drop(index, row);
    }
    /** @type {number[]} */
    const fresh = [];
    for (let index = first; index <= last; index += 1) {
      if (!this.rows.has(index)) fresh.push(index);
    }
    for (const index of fresh) this.#make(index);
    let isChanged = false;
    for (const index of fresh) isChanged = this.#measure(index) || isChanged;
    this.inner.style.height = `${this.places.total}px`;
    for (const [index, row] of this.rows) row.style.transform = `translateY(${this.places.top(index)}px)`;
    return isChanged;
  }

  /** @param {number} index */
  #make(index) {
    const row = h("div", {
      class: "row",
      role: "listitem",
      "aria-setsize": this.items.length,
      "aria-posinset": index + 1,
    });
    row.append(this.render(this.items[index], index));
    if (index === this.selected) row.setAttribute("aria-current", "true");
    row.dataset.index = String(index);
    this.rows.set(index, row);
    const after = [...this.rows.keys()].filter((each) => each > index).sort((a, b) => a - b)[0];
    this.inner.insertBefore(row, after === undefined ? null : (this.rows.get(after) ?? null));
    this.rowSizes.observe(row);
  }

  /** @param {number} index */
  #measure(index) {
    const height = this.rows.get(index)?.offsetHeight ?? 0;
    if (!height || height === this.places.heights[index]) return false;
    this.places.measure(index, height);
    return true;
  }

  /** @param {number} index @param {HTMLElement} row */
  #drop(index, row) {
    this.rowSizes.unobserve(row);
    row.remove();
    this.rows.delete(index);
  }

  /** @param {ResizeObserverEntry[]} entries */
  #measured(entries) {
    let isChanged = false;
    for (const { target } of entries) {
      const index = Number(/** @type {HTMLElement} */ (target).dataset.index);
      if (this.rows.get(index) === target) isChanged = this.#measure(index) || isChanged;
    }
    if (isChanged) this.draw();
  }

  #resized() {
    const width = this.element.clientWidth;
    if (width !== this.width) {
      this.width = width;
      for (const index of this.rows.keys()) this.#measure(index);
    }
    this.draw();
  }
}
