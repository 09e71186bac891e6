"""The page of a report: styles, sections and legends.

`watch.report` and `watch.agents_report` fill `embedded`, the first tab of an exported page (`watch.site.export`).
Benchmarks fill `page`, which stands alone. Styles are inside, and nothing else is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def page(title: str, body: str) -> str:
    """Return a whole page as HTML. `body` is HTML."""
    return _PAGE.format(title=escape(title), style=_STYLE, body=body)


def embedded(body: str) -> str:
    """Return the body of a report as a part of another page, whose other parts keep their styles. `body` is HTML."""
    return f"<style>@scope (.report-page) {{\n{_STYLE}}}</style><div class='report-page'><div>{body}</div></div>"


def section(title: str, content: str, note: str) -> str:
    """Return one section of the page as HTML. `content` is HTML, `title` and `note` are text."""
    return f"<section><h2>{escape(title)}</h2>{content}<p class='note'>{escape(note)}</p></section>"


def tiles(figures: Sequence[tuple[str, str, str]]) -> str:
    """Return a row of figures as HTML. Each figure is (value, name, note), which are text and are escaped here."""
    cards = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span><i>{escape(note)}</i></div>'
        for value, name, note in figures
    )
    return f"<div class='tiles'>{cards}</div>"


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Return the names and colors of a drawing as HTML."""
    items = "".join(f"<span><i style='background:{color}'></i>{escape(name)}</span>" for name, color in entries)
    return f"<div class='legend'>{items}</div>"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ margin: 0; }}
{style}</style></head><body class="report-page"><main>
{body}
</main></body></html>
"""
_STYLE = """\
:scope { --ink: #1b1f24; --muted: #6b7280; --line: #e7e9ee; --blue: #2f5fd0; --green: #157f57; --red: #b8452d; }
* { box-sizing: border-box; }
:scope { margin: 0; background: #fbfbfc; color: var(--ink); font: 15px/1.55 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", Arial, sans-serif; font-variant-numeric: tabular-nums; }
main, :scope > div { max-width: 1120px; margin: 0 auto; padding: 56px 30px 80px; }
.kicker { margin: 0; color: var(--blue); font-weight: 600; letter-spacing: .02em; }
h1 { margin: 6px 0 10px; font-size: 36px; line-height: 1.15; letter-spacing: -.02em; font-weight: 700; }
.lead { margin: 0; max-width: 780px; font-size: 17px; color: #3b424c; }
h2 { margin: 0 0 16px; font-size: 20px; letter-spacing: -.01em; }
section { margin-top: 28px; padding: 26px 30px 22px; background: #fff; border: 1px solid var(--line);
  border-radius: 12px; }
.note { margin: 14px 0 0; max-width: 860px; color: var(--muted); font-size: 13.5px; }
svg { display: block; width: 100%; height: auto; font-size: 12px; font-family: inherit; }
.tiles { display: grid; grid-template-columns: 1.25fr repeat(4, 1fr); gap: 14px; margin-top: 30px; }
.tiles:has(> :nth-child(6):last-child) { grid-template-columns: repeat(3, 1fr); }
.tile { padding: 18px 18px 16px; background: #fff; border: 1px solid var(--line); border-radius: 12px; }
.tile b { display: block; font-size: 27px; line-height: 1.2; letter-spacing: -.02em; white-space: nowrap; }
.tile span { display: block; margin-top: 4px; font-weight: 500; font-size: 14px; }
.tile i { display: block; margin-top: 3px; color: var(--muted); font-style: normal; font-size: 12.5px;
  line-height: 1.4; }
.two { display: grid; grid-template-columns: 1fr 1fr; gap: 30px; }
.apart { margin-top: 30px; }
.legend { display: flex; flex-wrap: wrap; gap: 6px 22px; margin: 0 0 12px; font-size: 13px; color: #3b424c; }
svg + .legend { margin: 12px 0 0; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 7px;
  vertical-align: -1px; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 30px; padding: 11px 0; border-top: 1px solid var(--line); }
.pair.head { border: 0; padding: 0 0 8px; font-weight: 600; font-size: 13.5px; color: var(--muted); }
.episode { font-size: 14px; line-height: 2; }
.env { color: var(--muted); margin-right: 6px; }
.say { font-weight: 650; padding: 2px 7px; background: #eef2fc; color: #22459a; border-radius: 6px; margin-right: 4px; }
.say small { font-weight: 400; color: #56699b; margin-left: 5px; font-size: 11px; }
.verdict { float: right; margin-left: 12px; font-size: 12.5px; font-weight: 600; color: var(--muted); }
.won { color: var(--green); } .lost { color: var(--red); }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; padding: 4px 10px 4px 0; border-top: 1px solid var(--line); vertical-align: top; }
td:last-child { overflow-wrap: anywhere; }
.bar { display: flex; align-items: center; gap: 10px; margin: 5px 0; font-size: 13.5px; }
.bar span { width: 150px; } .bar i { height: 14px; border-radius: 3px; }
dl { display: grid; grid-template-columns: 150px 1fr; gap: 6px 18px; margin: 0; font-size: 14px; }
dt { color: var(--muted); } dd { margin: 0; }
@media (max-width: 860px) { .tiles, .two, .pair { grid-template-columns: 1fr; }
  main, :scope > div { padding: 32px 16px; } }
"""
"""Styles of a report. `:scope` is its root: the element of `embedded`, or the whole page."""
