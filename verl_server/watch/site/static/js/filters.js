/**
 * Filters of episodes: the form, the words of the query, and the same conditions for rows that are at hand.
 *
 * `step` and `find` show the form. The server applies the filters; in an exported page, `fits` does.
 */

import { h } from "./dom.js";
import { toNumber, words } from "./format.js";

const STOP_REASONS = [
  "done",
  "max_turns",
  "max_tokens",
  "context_full",
  "time_limit",
  "straggler",
  "env_timeout",
  "env_error",
  "action_refused",
  "generation_error",
  "generation_timeout",
  "aborted",
  "agent_error",
  "agent_killed",
  "isolation_failed",
  "idle",
  "session_lost",
];
const FAULTS = ["policy", "infrastructure", "unknown"];

/** Names of the filters in queries. Names of the page's places and of the server's addresses are the same. */
export const FILTER_NAMES = [
  "error",
  "fault",
  "from",
  "group",
  "lost",
  "reward_from",
  "reward_to",
  "step",
  "stop",
  "to",
  "tokens_from",
  "tokens_to",
  "tool",
  "version",
];

/**
 * Return the filters of a place's query.
 * @param {Record<string, string>} query
 * @returns {Record<string, string>}
 */
export function filtersOf(query) {
  return Object.fromEntries(FILTER_NAMES.filter((name) => query[name]).map((name) => [name, query[name]]));
}

/**
 * Return true if the row of an episode passes the filters.
 * @param {any} row `Row` in answers/steps.py.
 * @param {Record<string, string>} filters
 */
export function fits(row, filters) {
  const within = (/** @type {unknown} */ value, /** @type {string} */ name) => {
    const number = toNumber(value);
    const [low, high] = [filters[`${name}_from`], filters[`${name}_to`]];
    if (!low && !high) return true;
    return number !== null && (!low || number >= Number(low)) && (!high || number <= Number(high));
  };
  return (
    (!filters.stop || row.stop_reason === filters.stop) &&
    (!filters.fault || row.fault === filters.fault) &&
    (!filters.error || row.error !== "") &&
    (!filters.group || row.group === filters.group) &&
    (!filters.step || String(row.step) === filters.step) &&
    (!filters.tool || row.tools.includes(filters.tool)) &&
    (!filters.version || row.oldest_version === filters.version || row.newest_version === filters.version) &&
    (!filters.from || Number(row.step) >= Number(filters.from)) &&
    (!filters.to || Number(row.step) <= Number(filters.to)) &&
    within(row.reward, "reward") &&
    within(row.tokens, "tokens") &&
    (Boolean(filters.lost) || !row.lost)
  );
}

/**
 * Return groups in the order of `sort`, as the server sorts them.
 * @param {any[]} groups `Group` in answers/steps.py.
 * @param {string} sort
 */
export function sortedGroups(groups, sort) {
  const key = (/** @type {any} */ group) => {
    const isUpward = sort === "number" || sort === "flat";
    const figure = toNumber(group[sort === "flat" ? "spread" : sort || "spread"]);
    return figure === null ? -Infinity : isUpward ? -figure : figure;
  };
  return [...groups].sort((a, b) => key(b) - key(a) || a.number - b.number);
}

/**
 * Make the form of the filters.
 * @param {Record<string, string>} query The present ones.
 * @param {(filters: Record<string, string>) => void} onChange Gets all filters when one has changed.
 * @param {{steps?: boolean, search?: boolean, orders?: string[][], orderName?: string}} [options] `steps`: with the
 *   range of steps; `search`: with the field for a text; `orders`: choices of the order.
 */
export function filterForm(query, onChange, { steps = false, search = false, orders = [], orderName = "sort" } = {}) {
  const choice = (/** @type {string} */ name, /** @type {string} */ title, /** @type {string[]} */ values) =>
    field(
      title,
      h(
        "select",
        { name },
        h("option", { value: "" }, "any"),
        values.map((value) => h("option", { value, selected: query[name] === value }, words(value))),
      ),
    );
  const range = (/** @type {string} */ name, /** @type {string} */ title, from = `${name}_from`, to = `${name}_to`) =>
    h(
      "span",
      { class: "field" },
      h("span", { class: "field-title" }, title),
      number(from, `${title} from`, query[from]),
      "\u2013",
      number(to, `${title} to`, query[to]),
    );
  const form = h(
    "form",
    { class: "filters", "aria-label": "Filters" },
    search
      ? h("input", {
          type: "search",
          name: "q",
          value: query.q ?? "",
          placeholder: "Text in messages, calls, errors",
          "aria-label": "Search the texts",
        })
      : null,
    choice("stop", "end", STOP_REASONS),
    choice("fault", "fault", FAULTS),
    range("reward", "reward"),
    range("tokens", "tokens"),
    field("tool", h("input", { type: "text", name: "tool", value: query.tool ?? "", class: "short" })),
    steps ? range("step", "steps", "from", "to") : null,
    steps
      ? field("version", h("input", { type: "text", name: "version", value: query.version ?? "", class: "short" }))
      : null,
    h(
      "label",
      { class: "check" },
      h("input", { type: "checkbox", name: "error", value: "1", checked: Boolean(query.error) }),
      "with an error",
    ),
    steps
      ? h(
          "label",
          { class: "check", title: "Steps that were lost when the run was killed, and ran again" },
          h("input", { type: "checkbox", name: "lost", value: "1", checked: Boolean(query.lost) }),
          "lost ones, too",
        )
      : null,
    orders.length
      ? field(
          "order",
          h(
            "select",
            { name: orderName },
            orders.map(([value, title]) => h("option", { value, selected: (query[orderName] ?? "") === value }, title)),
          ),
        )
      : null,
    Object.keys(filtersOf(query)).length || query.q
      ? h("button", { type: "button", class: "quiet", data: { reset: "1" } }, "reset")
      : null,
  );
  const read = () => /** @type {Record<string, string>} */ (Object.fromEntries(new FormData(form)));
  form.addEventListener("change", () => onChange(read()));
  form.addEventListener("submit", (/** @type {Event} */ event) => {
    event.preventDefault();
    onChange(read());
  });
  form.querySelector("[data-reset]")?.addEventListener("click", () => {
    const empty = Object.fromEntries(["q", ...FILTER_NAMES].map((name) => [name, ""]));
    onChange({ ...read(), ...empty });
  });
  return form;
}

/** @param {string} title @param {HTMLElement} input */
function field(title, input) {
  return h("label", { class: "field" }, h("span", { class: "field-title" }, title), input);
}

/** @param {string} name @param {string} label @param {string} [value] */
function number(name, label, value = "") {
  return h("input", { type: "number", step: "any", name, value, "aria-label": label, class: "short" });
}
