"""The styles of a report stand in each page that has one."""

from __future__ import annotations

import re

import pytest

from verl_server.watch.page import embedded, page, section, tiles


@pytest.mark.parametrize("made", [page, lambda _, body: embedded(body)], ids=["a page of its own", "a part of a page"])
def test_a_page_has_a_style_for_each_class_of_its_parts(made: object) -> None:
    assert callable(made)
    html = made("title", tiles([("1", "name", "note")]) + section("title", "content", "note"))
    style = html[html.index("<style>") : html.index("</style>")]
    for name in set(re.findall(r"class=['\"]([a-z]+)['\"]", html[html.index("</style>") :])):
        assert f".{name} {{" in style, name
    assert "--ink: #" in style and "section {" in style
