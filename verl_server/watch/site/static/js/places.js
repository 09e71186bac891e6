/**
 * Places on the page and addresses of answers. A place is the part of the URL after `#`.
 *
 * `main` reads the place to choose the view, the views make links with `link`, and `api` makes the canonical addresses
 * with `address`: the same question always has the same text, so that an exported page finds its answer. All functions
 * are pure.
 */

/**
 * @typedef {object} Place
 * @property {string} view overview, waits, steps, step, find, compare, episode, settings or report.
 * @property {string[]} parts What follows the view's name, such as the run and the step.
 * @property {Record<string, string>} query
 */

/** Number of tokens in a window of the token strips: windows begin at its multiples. */
export const TOKEN_WINDOW = 2000;

/**
 * @param {string} hash `location.hash`.
 * @returns {Place}
 */
export function parsePlace(hash) {
  const text = hash.replace(/^#/, "").replace(/^\//, "");
  const [path, query = ""] = splitOnce(text, "?");
  const [view, ...parts] = path.split("/").map(decoded);
  return { view: view || "overview", parts: parts.filter((part) => part !== ""), query: parseQuery(query) };
}

/**
 * Return the `href` of a place.
 * @param {string} view
 * @param {(string | number)[]} [parts]
 * @param {Record<string, unknown>} [query] Entries that are null, undefined or "" are left out.
 */
export function link(view, parts = [], query = {}) {
  const path = [view === "overview" ? "" : view, ...parts].map((part) => encodeURIComponent(String(part))).join("/");
  const rest = queryText(query);
  return `#/${path}${rest ? `?${rest}` : ""}`;
}

/**
 * Return the canonical address of an answer: encoded parts, sorted parameters.
 * @param {(string | number)[]} parts Such as ["runs", id, "metrics"].
 * @param {Record<string, unknown>} [query]
 */
export function address(parts, query = {}) {
  const rest = queryText(query);
  return `/api/${parts.map((part) => encodeURIComponent(String(part))).join("/")}${rest ? `?${rest}` : ""}`;
}

/**
 * Return the text of a query, sorted by name.
 * @param {Record<string, unknown>} query
 */
export function queryText(query) {
  return Object.keys(query)
    .filter((name) => query[name] !== null && query[name] !== undefined && query[name] !== "" && query[name] !== false)
    .sort()
    .map((name) => `${encodeURIComponent(name)}=${encodeURIComponent(String(query[name]))}`)
    .join("&");
}

/**
 * Return the starts of the token windows that cover [begin, end).
 * @param {number} begin
 * @param {number} end
 */
export function windowStarts(begin, end) {
  const starts = [];
  const first = Math.floor(Math.max(0, begin) / TOKEN_WINDOW) * TOKEN_WINDOW;
  for (let start = first; start < end; start += TOKEN_WINDOW) starts.push(start);
  return starts;
}

/**
 * Take the key out of a hash such as `#key=K&/step/...`.
 * @param {string} hash
 * @returns {{key: string | null, rest: string}} `rest` is the hash without the key.
 */
export function takeKey(hash) {
  const match = /^#key=([^&]*)(?:&(.*))?$/s.exec(hash);
  if (!match) return { key: null, rest: hash };
  return { key: decoded(match[1]), rest: match[2] ? `#${match[2]}` : "#/" };
}

/** @param {string} text */
function parseQuery(text) {
  /** @type {Record<string, string>} */
  const query = {};
  for (const part of text.split("&")) {
    if (!part) continue;
    const [name, value = ""] = splitOnce(part, "=");
    query[decoded(name)] = decoded(value.replace(/\+/g, "%20"));
  }
  return query;
}

/**
 * @param {string} text
 * @param {string} mark
 * @returns {[string, string?]}
 */
function splitOnce(text, mark) {
  const at = text.indexOf(mark);
  return at < 0 ? [text] : [text.slice(0, at), text.slice(at + 1)];
}

/** Decode percent signs; a text that has broken ones stays as it is. @param {string} text */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
