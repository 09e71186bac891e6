"""`faint_texts`: the texts of a page that are hard to read on their grounds, in the document and on canvases.

The contrast is that of WCAG 2: (L1 + 0.05) / (L2 + 0.05) of the relative luminances. The page computes it from its own
styles. Texts on canvases are noted while they are drawn, with the rectangles below them, so that `note_canvas_texts`
must be called before the page is loaded.
"""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page

LEAST = 4.5
"""Least contrast of a text of normal size."""
# A clearing of the canvas begins a new picture. A rectangle counts for a text if the middle of the text is in it.
_NOTES = """
(() => {
  const drawing = CanvasRenderingContext2D.prototype;
  const { fillRect, clearRect, fillText } = drawing;
  window.canvasNotes = new Map();
  const notesOf = (canvas) => {
    if (!window.canvasNotes.has(canvas)) window.canvasNotes.set(canvas, { grounds: [], texts: [] });
    return window.canvasNotes.get(canvas);
  };
  const at = (context, x, y) => context.getTransform().transformPoint({ x, y });
  drawing.clearRect = function (...box) {
    window.canvasNotes.delete(this.canvas);
    clearRect.apply(this, box);
  };
  drawing.fillRect = function (x, y, width, height) {
    const [from, to] = [at(this, x, y), at(this, x + width, y + height)];
    notesOf(this.canvas).grounds.push({ from, to, colour: this.fillStyle });
    fillRect.call(this, x, y, width, height);
  };
  drawing.fillText = function (text, x, y, ...most) {
    const notes = notesOf(this.canvas);
    const half = Math.min(this.measureText(text).width, most[0] ?? Infinity) / 2;
    const middle = at(this, x + ({ right: -half, end: -half, center: 0 }[this.textAlign] ?? half), y);
    const within = ({ from, to }) =>
      from.x <= middle.x && middle.x <= to.x && from.y <= middle.y && middle.y <= to.y;
    const grounds = notes.grounds.filter(within).map(({ colour }) => colour);
    notes.texts.push({ text, colour: this.fillStyle, grounds });
    fillText.call(this, text, x, y, ...most);
  };
})();
"""
_FAINT = """(least) => {
  const pixel = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const known = new Map();
  const parse = (colour) => {
    if (!known.has(colour)) {
      pixel.clearRect(0, 0, 1, 1);
      pixel.fillStyle = colour;
      pixel.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = pixel.getImageData(0, 0, 1, 1).data;
      known.set(colour, { rgb: [r, g, b], alpha: a / 255 });
    }
    return known.get(colour);
  };
  const over = ({ rgb, alpha }, below) => rgb.map((value, index) => value * alpha + below[index] * (1 - alpha));
  const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((value) => linear(value / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const parentOf = (element) => element.parentElement ?? element.getRootNode().host ?? null;
  const groundOf = (element) => {
    const colours = [];
    for (let each = element; each; each = parentOf(each)) colours.push(parse(getComputedStyle(each).backgroundColor));
    return colours.reverse().reduce((below, colour) => over(colour, below), [255, 255, 255]);
  };
  const opacityOf = (element) => {
    let opacity = 1;
    for (let each = element; each; each = parentOf(each)) opacity *= Number(getComputedStyle(each).opacity);
    return opacity;
  };
  function* textNodes(root) {
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT | NodeFilter.SHOW_ELEMENT);
    while (walker.nextNode()) {
      const node = walker.currentNode;
      if (node.shadowRoot) yield* textNodes(node.shadowRoot);
      if (node.nodeType === Node.TEXT_NODE && node.textContent.trim()) yield node;
    }
  }
  const found = [];
  let count = 0;
  const judge = (text, colour, ground, opacity = 1) => {
    count += 1;
    const ink = over({ rgb: colour.rgb, alpha: colour.alpha * opacity }, ground);
    const ratio = contrast(ink, ground);
    if (ratio < least) found.push(`${text.trim().slice(0, 40)}: ${ratio.toFixed(2)}`);
  };
  for (const node of textNodes(document.body)) {
    const element = node.parentElement ?? node.getRootNode().host;
    // What cannot be used now may be faint, and tells so.
    if (!element.checkVisibility({ visibilityProperty: true }) || element.closest(".off, script, style, option"))
      continue;
    const style = getComputedStyle(element);
    const colour = element instanceof SVGElement ? style.fill : style.color;
    judge(node.textContent, parse(colour), groundOf(element), opacityOf(element));
  }
  for (const [canvas, { texts }] of window.canvasNotes ?? []) {
    if (!canvas.isConnected) continue;
    const panel = groundOf(canvas);
    for (const { text, colour, grounds } of texts) {
      const ground = grounds.reduce((below, each) => over(parse(each), below), panel);
      if (text.trim()) judge(`canvas: ${text}`, parse(colour), ground);
    }
  }
  return { found: [...new Set(found)], count };
}
"""


def note_canvas_texts(page: Page) -> None:
    page.add_init_script(_NOTES)


def faint_texts(page: Page) -> list[str]:
    """Return the texts in the document with a contrast below `LEAST`, each with its contrast."""
    answer: dict[str, Any] = page.evaluate(_FAINT, LEAST)
    assert answer["count"] > 10, "The page has no texts yet."
    return list(answer["found"])
