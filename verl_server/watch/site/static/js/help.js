/**
 * `helpDialog`: the list of the keys, which `?` shows.
 */

import { h } from "./dom.js";

const KEYS = [
  [
    "Everywhere",
    [
      ["g o", "overview"],
      ["g w", "who waits"],
      ["g s", "steps"],
      ["g f", "find episodes"],
      ["/", "search"],
      ["Esc", "back"],
      ["?", "this list"],
    ],
  ],
  [
    "Lists",
    [
      ["j", "next"],
      ["k", "previous"],
      ["Enter", "open or fold"],
    ],
  ],
  [
    "Step",
    [
      ["n", "next step"],
      ["p", "previous step"],
    ],
  ],
  [
    "Episode",
    [
      ["j", "next episode of the group"],
      ["k", "previous one"],
      ["n", "next turn"],
      ["p", "previous turn"],
      ["c", "next colour of the tokens"],
      ["t", "fold the tokens"],
      ["u", "up to the step"],
    ],
  ],
  [
    "Charts and lanes",
    [
      ["drag", "zoom"],
      ["double click", "show everything"],
      ["click", "open the step or the episode"],
      ["\u2190 \u2192", "move the cursor; pan the lanes"],
      ["+ \u2212 0", "zoom the lanes; show everything"],
    ],
  ],
];

export function helpDialog() {
  const close = h("button", { type: "button", class: "quiet", "aria-label": "Close" }, "\u2715");
  const groups = KEYS.map(([title, keys]) =>
    h(
      "section",
      {},
      h("h3", {}, title),
      h(
        "dl",
        {},
        .../** @type {string[][]} */ (keys).map(([key, what]) =>
          h("div", {}, h("dt", {}, ...key.split(" ").map((each) => h("kbd", {}, each))), h("dd", {}, what)),
        ),
      ),
    ),
  );
  const dialog = h(
    "dialog",
    { class: "help", "aria-labelledby": "help-title" },
    h("header", {}, h("h2", { id: "help-title" }, "Keys"), close),
    h("div", { class: "help-groups" }, groups),
  );
  close.addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (/** @type {MouseEvent} */ event) => {
    if (event.target === dialog) dialog.close();
  });
  return dialog;
}
