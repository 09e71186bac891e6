/**
 * Arithmetic on columns of numbers for the charts: smoothing, joining of runs, stacking, marks of what is not finite.
 *
 * `charts` calls it with the answers of the server. All functions are pure.
 *
 * A column is an array of numbers and nulls, as long as the column of its x values. null: there is no value.
 */

/** @typedef {(number | null)[]} Column */

/**
 * Return a smoothed column: each entry is a mean that weighs a value by `decay` ** (its distance in x).
 *
 * The mean looks to both sides, so that the line does not lag behind a trend. Values that are not finite and missing
 * values are left out; the line has a gap where a value is missing.
 * @param {number[]} x Ascending.
 * @param {Column} values
 * @param {number} decay From 0 (no smoothing) to below 1.
 * @returns {Column}
 */
export function smooth(x, values, decay) {
  const before = fadedSums(x, values, decay);
  const after = fadedSums(
    [...x].reverse().map((at) => -at),
    [...values].reverse(),
    decay,
  ).reverse();
  return values.map((value, index) => {
    if (value === null) return null;
    const own = Number.isFinite(value) ? 1 : 0; // both sums have the entry itself
    const weight = before[index].weight + after[index].weight - own;
    const sum = before[index].sum + after[index].sum - (own ? value : 0);
    return weight > 1e-12 ? sum / weight : null;
  });
}

/**
 * Return for each entry the sum of the values up to it, faded by their distances, and the sum of their weights.
 * @param {number[]} x Ascending.
 * @param {Column} values
 * @param {number} decay
 */
function fadedSums(x, values, decay) {
  let sum = 0;
  let weight = 0;
  return values.map((value, index) => {
    const fade = index ? decay ** (x[index] - x[index - 1]) : 1;
    sum *= fade;
    weight *= fade;
    if (value !== null && Number.isFinite(value)) {
      sum += value;
      weight += 1;
    }
    return { sum, weight };
  });
}

/**
 * Return the decay that suits `count` points: none for short runs, a window of a fiftieth of long ones.
 * @param {number[]} x Ascending.
 */
export function decayFor(x) {
  if (x.length < 12) return 0;
  const span = x[x.length - 1] - x[0];
  const window = Math.max(3, span / 50);
  return Math.exp(-1 / window);
}

/**
 * Join the columns of several tables on their x values.
 * @param {{x: number[], columns: Column[]}[]} tables Each x ascends.
 * @returns {{x: number[], columns: Column[][]}} The columns of each table, on the common x values.
 */
export function joinTables(tables) {
  const all = new Set();
  for (const table of tables) for (const x of table.x) all.add(x);
  const x = [...all].sort((a, b) => a - b);
  /** @type {Map<number, number>} */
  const rows = new Map(x.map((value, index) => [value, index]));
  const columns = tables.map((table) =>
    table.columns.map((column) => {
      /** @type {Column} */
      const joined = new Array(x.length).fill(null);
      table.x.forEach((value, index) => {
        joined[/** @type {number} */ (rows.get(value))] = column[index] ?? null;
      });
      return joined;
    }),
  );
  return { x, columns };
}

/**
 * Return the sums of each column and those below it, for areas that lie on each other. Missing values count as 0.
 * @param {Column[]} columns The lowest area first.
 * @returns {number[][]}
 */
export function stack(columns) {
  /** @type {number[][]} */
  const sums = [];
  for (const column of columns) {
    const below = sums[sums.length - 1];
    sums.push(
      column.map((value, index) => (value !== null && Number.isFinite(value) ? value : 0) + (below ? below[index] : 0)),
    );
  }
  return sums;
}

/**
 * Part a column into what can be drawn and the indices of values that are not finite, which a chart marks.
 * @param {Column} values
 * @returns {{drawn: Column, marks: number[]}}
 */
export function finiteParts(values) {
  /** @type {number[]} */
  const marks = [];
  const drawn = values.map((value, index) => {
    if (value === null || Number.isFinite(value)) return value;
    marks.push(index);
    return null;
  });
  return { drawn, marks };
}

/**
 * Return the column with null instead of values that a logarithmic axis cannot show.
 * @param {Column} values
 * @returns {Column}
 */
export function positive(values) {
  return values.map((value) => (value !== null && value > 0 ? value : null));
}

/**
 * Return the range of a logarithmic axis in whole decades, so that also values that are all alike have one.
 * @param {unknown} _ The plot.
 * @param {number | null} low
 * @param {number | null} high
 * @returns {[number, number]}
 */
export function decades(_, low, high) {
  if (low === null || high === null) return [0.1, 1];
  const [from, to] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  return [10 ** (from === to ? from - 1 : from), 10 ** (from === to ? to + 1 : to)];
}

/**
 * Return the range of several columns of x values, half a step around a single value, and [0, 1] without one.
 * @param {number[][]} columns Each ascends.
 * @returns {[number, number]}
 */
export function extent(columns) {
  const used = columns.filter((x) => x.length);
  if (!used.length) return [0, 1];
  const low = Math.min(...used.map((x) => x[0]));
  const high = Math.max(...used.map((x) => x[x.length - 1]));
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

/**
 * Return the index of the entry of `x` that is nearest to `value`, -1 for an empty `x`.
 * @param {number[]} x Ascending.
 * @param {number} value
 */
export function nearest(x, value) {
  if (!x.length) return -1;
  let low = 0;
  let high = x.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (x[middle] < value) low = middle;
    else high = middle;
  }
  return Math.abs(x[low] - value) <= Math.abs(x[high] - value) ? low : high;
}
