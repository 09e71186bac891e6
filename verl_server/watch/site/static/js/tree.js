/**
 * `BranchTree`: the branches and sub-agents of an episode as a tree. `episode` shows it when there are several.
 */

import { foreign, h } from "./dom.js";
import { counted, whole } from "./format.js";
import { WindowedList } from "./list.js";

/**
 * Return the branches, parents before children, each with its depth.
 * @param {any[]} tree `Branch` of answers/episode.py.
 * @returns {{branch: any, depth: number}[]}
 */
export function orderedTree(tree) {
  const children = new Map();
  const rows = new Set(tree.map((branch) => branch.row));
  for (const branch of tree) {
    const parent =
      branch.parent !== null && rows.has(branch.parent) && branch.parent !== branch.row ? branch.parent : null;
    children.set(parent, [...(children.get(parent) ?? []), branch]);
  }
  /** @type {{branch: any, depth: number}[]} */
  const ordered = [];
  const seen = new Set();
  const add = (/** @type {any} */ branch, /** @type {number} */ depth) => {
    if (seen.has(branch.row)) return;
    seen.add(branch.row);
    ordered.push({ branch, depth });
    for (const child of children.get(branch.row) ?? []) add(child, depth + 1);
  };
  for (const root of children.get(null) ?? []) add(root, 0);
  for (const branch of tree) add(branch, 0); // those of a circle of parents
  return ordered;
}

export class BranchTree {
  /**
   * @param {any[]} tree
   * @param {string} current Row of the branch that is shown.
   * @param {(row: string) => string} href
   */
  constructor(tree, current, href) {
    const ordered = orderedTree(tree);
    this.list = new WindowedList({
      label: "Branches and sub-agents",
      guess: 44,
      render: ({ branch, depth }) =>
        h(
          "a",
          {
            class: `branch ${branch.kind}`,
            href: href(branch.row),
            "aria-current": branch.row === current ? "true" : null,
            style: { "--depth": String(Math.min(depth, 8)) },
          },
          h(
            "span",
            {},
            h(
              "b",
              {},
              branch.kind === "root" ? "root" : branch.kind === "branch" ? `branch ${branch.branch}` : "sub-agent",
            ),
            " ",
            foreign(branch.session.slice(0, 8), "muted"),
          ),
          h(
            "small",
            { class: "muted" },
            `${counted(branch.turns, "turn")}, ${whole(branch.tokens)} tokens`,
            branch.shared ? `, ${whole(branch.shared)} shared` : "",
          ),
        ),
    });
    this.list.setItems(ordered);
    const own = ordered.findIndex(({ branch }) => branch.row === current);
    requestAnimationFrame(() => own > 0 && this.list.reveal(own));
  }

  destroy() {
    this.list.destroy();
  }
}
