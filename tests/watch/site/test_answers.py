"""The examples in `examples/` are answers: every field that the page's scripts read there exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from verl_server.watch.site import answers
from verl_server.watch.site.answers import advisories, episode, evaluations, lanes, runs, steps, values

EXAMPLES = Path(__file__).parent / "examples"
KINDS = {
    name: kind
    for module in (advisories, episode, evaluations, lanes, runs, steps, values)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
}
INDEX: dict[str, dict[str, str]] = msgspec.json.decode((EXAMPLES / "index.json").read_bytes())


@pytest.mark.parametrize("url", INDEX)
def test_an_example_has_exactly_the_fields_of_its_answer(url: str) -> None:
    kind = KINDS[INDEX[url]["answer"]]
    raw = msgspec.json.decode((EXAMPLES / INDEX[url]["file"]).read_bytes())
    assert msgspec.json.decode(msgspec.json.encode(msgspec.convert(raw, kind))) == raw


def test_every_answer_has_an_example() -> None:
    shown = {entry["answer"] for entry in INDEX.values()}
    documented = {line.split()[-1] for line in (answers.__doc__ or "").splitlines() if line.startswith("    /api/runs")}
    assert documented <= shown


def test_parameters_are_in_alphabetical_order() -> None:
    def names(url: str) -> list[Any]:
        return [pair.split("=")[0] for pair in url.partition("?")[2].split("&") if pair]

    assert all(names(url) == sorted(names(url)) for url in INDEX)
