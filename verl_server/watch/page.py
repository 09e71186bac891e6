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
"""
