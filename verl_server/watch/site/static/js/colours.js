/**
 * The colours of the page: of runs, of kinds of time, of tokens. They can be told apart by the colour-blind.
 *
 * Charts and canvases call it. The hues are those of Okabe and Ito; canvases get their ink from the style sheet's
 * custom properties, so that light and dark follow the reader's system. Functions that take `dark` are pure.
 */

const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#b5569a", "#3a9bd9", "#a67c00", "#5b5b5b"];
const DARK = ["#5db3e6", "#ff9148", "#2fc99a", "#e59bcb", "#9cd3f7", "#e3b93b", "#b5b5b5"];

/** @type {Record<string, [string, string]>} Kind of time or end -> colour in light and in dark. */
const KINDS = {
  generate: ["#0072b2", "#5db3e6"],
  env: ["#e69f00", "#e9b23c"],
  queue: ["#9aa1ab", "#7b838f"],
  rollout: ["#3a9bd9", "#4d9ecf"],
  wait: ["#c9ced6", "#4a525e"],
  idle: ["#dfe3e9", "#353c46"],
  train: ["#009e73", "#2fc99a"],
  sync: ["#b5569a", "#d48cba"],
  push: ["#b5569a", "#d48cba"],
  record: ["#7a6a53", "#b7a58a"],
  save: ["#a67c00", "#d7b04a"],
  evaluation: ["#5b4fa8", "#a99cf2"],
  held: ["#a89fd6", "#6c61ad"],
  failed: ["#d55e00", "#ff9148"],
  policy: ["#0072b2", "#5db3e6"],
  infrastructure: ["#d55e00", "#ff9148"],
  unknown: ["#8a8f98", "#8a93a0"],
};

/**
 * Return the colour of the run at `index` in the list of runs.
 * @param {number} index
 * @param {boolean} dark
 */
export function runColour(index, dark) {
  const colours = dark ? DARK : LIGHT;
  return colours[index % colours.length];
}

/**
 * Return the colour of a kind of time, such as a phase of the trainer. Unknown kinds have one by their name.
 * @param {string} kind
 * @param {boolean} dark
 */
export function kindColour(kind, dark) {
  const known = KINDS[kind];
  if (known) return known[dark ? 1 : 0];
  let sum = 0;
  for (const character of kind) sum = (sum * 31 + (character.codePointAt(0) ?? 0)) % 9973;
  return runColour(sum, dark);
}

/**
 * Return the colour with an opacity.
 * @param {string} hex "#rrggbb".
 * @param {number} alpha
 */
export function faded(hex, alpha) {
  const value = parseInt(hex.slice(1), 16);
  return `rgba(${value >> 16}, ${(value >> 8) & 255}, ${value & 255}, ${Math.round(1000 * alpha) / 1000})`;
}

/**
 * Return black or white for a text on a colour: the one that stands out from it.
 * @param {string} hex "#rrggbb".
 */
export function inkOn(hex) {
  const value = parseInt(hex.slice(1), 16);
  const linear = [16, 8, 0].map((shift) => (((value >> shift) & 255) / 255) ** 2.2);
  const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return luminance > 0.18 ? "#000000" : "#ffffff";
}

/**
 * Return the colour of a reward between the smallest and the largest one: orange is low, blue is high.
 * @param {number | null} reward
 * @param {number} low
 * @param {number} high
 * @param {boolean} dark
 */
export function rewardColour(reward, low, high, dark) {
  if (reward === null || !Number.isFinite(reward)) return dark ? "#4a525e" : "#c9ced6";
  const share = high > low ? Math.min(1, Math.max(0, (reward - low) / (high - low))) : reward > 0 ? 1 : 0.5;
  return mixed(dark ? "#c25a12" : "#e8894a", dark ? "#d6d9de" : "#e9e6dd", dark ? "#3f95cf" : "#1f78b4", share);
}

/** The ways to colour tokens, with the texts of their legends. */
export const TOKEN_COLOURS = [
  {
    name: "mask",
    title: "who wrote it",
    column: "mask",
    legend: [
      ["sampled by the policy: in the loss", 1],
      ["sampled, but not in the loss", 2],
      ["read by the policy", 0],
    ],
    hint: "Only sampled tokens that had an alternative are in the loss.",
  },
  {
    name: "logprob",
    title: "log-probability",
    column: "logprob",
    legend: [
      ["0: certain", 0],
      ["\u22121", -1],
      ["\u22123", -3],
      ["\u22128 or less: a surprise", -8],
    ],
    hint: "The server's log-probability of each sampled token, at sampling time.",
  },
  {
    name: "difference",
    title: "trainer \u2212 server",
    column: "difference",
    legend: [
      ["\u22121 or less", -1],
      ["\u22120.01", -0.01],
      ["0", 0],
      ["+0.01", 0.01],
      ["+1 or more", 1],
    ],
    hint:
      "The trainer's log-probability minus the server's, on a logarithmic scale. Orange: the trainer finds the token " +
      "less likely than the server did. A large difference on all tokens means that the two do not compute the same policy.",
  },
  {
    name: "entropy",
    title: "entropy",
    column: "entropy",
    legend: [
      ["0: one choice", 0],
      ["1 nat", 1],
      ["3 nats or more", 3],
    ],
    hint: "The entropy of the trainer's policy at each trained token: where the policy was undecided.",
  },
  {
    name: "version",
    title: "version",
    column: "version",
    legend: [],
    hint: "The version of the weights that sampled each token. Several in one episode: a push came while it played.",
  },
];

/**
 * Return the background of a token, or null for none.
 * @param {string} name Name in `TOKEN_COLOURS`.
 * @param {number | null} value The token's value. For versions, its number in the order of the versions.
 * @param {boolean} dark
 */
export function tokenColour(name, value, dark) {
  if (value === null) return null;
  if (Number.isNaN(value)) return faded("#d6006c", 0.6);
  const strength = dark ? 0.55 : 0.62; // the ink must stand out from the strongest colour
  if (name === "mask") {
    if (value === 1) return faded(dark ? "#3f95cf" : "#56b4e9", dark ? 0.5 : 0.42);
    return value === 2 ? faded(dark ? "#8a93a0" : "#8a8f98", 0.4) : null;
  }
  if (name === "logprob") return faded("#e07b00", strength * Math.min(1, Math.sqrt(Math.max(0, -value) / 8)));
  if (name === "entropy") return faded("#a2559b", strength * Math.min(1, Math.sqrt(Math.max(0, value) / 3)));
  if (name === "difference") return faded(value < 0 ? "#e07b00" : "#0b7fc4", strength * differenceStrength(value));
  const hues = dark ? DARK : LIGHT;
  return faded(hues[value % hues.length], dark ? 0.38 : 0.32);
}

/**
 * Return how strong the colour of a difference is: 0 up to 1e-5, and 1 from 1 on, with a logarithm between them.
 * @param {number} value
 */
export function differenceStrength(value) {
  const size = Math.abs(value);
  if (!(size > 1e-5)) return 0;
  return Math.min(1, (Math.log10(size) + 5) / 5);
}

/** @param {string} low @param {string} middle @param {string} high @param {number} share */
function mixed(low, middle, high, share) {
  const [from, to, part] = share < 0.5 ? [low, middle, 2 * share] : [middle, high, 2 * share - 1];
  const a = parseInt(from.slice(1), 16);
  const b = parseInt(to.slice(1), 16);
  const at = [16, 8, 0].map((shift) => Math.round(((a >> shift) & 255) * (1 - part) + ((b >> shift) & 255) * part));
  return `#${at.map((each) => each.toString(16).padStart(2, "0")).join("")}`;
}
