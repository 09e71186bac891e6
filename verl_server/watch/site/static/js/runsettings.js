/**
 * The view Settings: all settings of a run. `main` opens it for `#/settings/RUN`.
 *
 * The query has names of settings that come first, such as those that an advisory is about (`name`), and a part of a
 * name or a value that leaves those which have it (`q`).
 */

import { emptyState, fill, foreign, h, loadingState } from "./dom.js";
import { counted } from "./format.js";
import { address, link } from "./places.js";
import { flatSettings } from "./settings.js";

const SHOWN_SETTINGS = 600;

/** @param {import("./main.js").Page} page @returns {import("./main.js").View} */
export function createSettings(page) {
  return new RunSettings(page);
}

/**
 * Return the settings in the order of the view: those that are named, then the others by name.
 * @param {Record<string, string>} settings
 * @param {string[]} named
 * @returns {[string, string, boolean][]} Name, value, and whether it is named.
 */
export function orderedSettings(settings, named) {
  const first = named.filter((name) => name in settings);
  const rest = Object.keys(settings)
    .filter((name) => !first.includes(name))
    .sort();
  return [...first, ...rest].map((name) => [name, settings[name], first.includes(name)]);
}

class RunSettings {
  /** @param {import("./main.js").Page} page */
  constructor(page) {
    this.page = page;
    this.head = h("div", { class: "view-head" });
    this.search = h("input", {
      type: "search",
      placeholder: "Part of a name or a value",
      "aria-label": "Search the settings",
      on: { input: () => this.#search() },
    });
    this.body = h("div", { class: "fill scroll" }, loadingState());
    this.element = h("div", { class: "page full" }, this.head, this.body);
    /** @type {[string, string, boolean][]} */
    this.rows = [];
    this.run = "";
  }

  destroy() {
    this.isGone = true;
  }

  /** @param {import("./places.js").Place} place */
  async update(place) {
    this.run = place.parts[0] ?? this.page.currentRun?.id ?? "";
    if (!this.run) return void fill(this.body, emptyState("No runs"));
    const { settings } = await this.page.api.get(address(["runs", this.run]));
    if (this.isGone) return;
    this.query = place.query;
    this.rows = orderedSettings(flatSettings(settings), (place.query.name ?? "").split(",").filter(Boolean));
    this.search.value = place.query.q ?? "";
    fill(
      this.head,
      h("h1", {}, "Settings of ", foreign(this.page.run(this.run)?.name ?? this.run)),
      h("span", { class: "muted" }, counted(this.rows.length, "setting")),
      h("span", { class: "spacer" }),
      this.search,
    );
    this.#draw();
  }

  #search() {
    this.query = { ...this.query, q: this.search.value };
    this.page.replace(link("settings", [this.run], this.query));
    this.#draw();
  }

  #draw() {
    const wanted = this.search.value.trim().toLowerCase();
    const found = this.rows.filter(([name, value]) => `${name} ${value}`.toLowerCase().includes(wanted));
    if (!found.length) {
      const [title, hint] = this.rows.length
        ? ["No setting has these words", "Widen the search."]
        : ["No settings are recorded", "A run stores them in its run.json."];
      return void fill(this.body, emptyState(title, hint));
    }
    const left = found.length - SHOWN_SETTINGS;
    fill(
      this.body,
      h(
        "table",
        { class: "settings" },
        h(
          "tbody",
          {},
          found
            .slice(0, SHOWN_SETTINGS)
            .map(([name, value, isNamed]) =>
              h(
                "tr",
                { class: isNamed ? "named" : null },
                h("th", { scope: "row" }, foreign(name)),
                h("td", {}, foreign(value)),
              ),
            ),
        ),
      ),
      left > 0 ? h("p", { class: "note" }, `${counted(left, "further setting")}: search for a part of a name.`) : null,
    );
  }
}
