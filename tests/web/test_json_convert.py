"""One conversion for the bodies of all routes: what loses nothing is accepted, everything else is refused."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest

from verl_server.web.json_convert import convert_json


class Inner(msgspec.Struct):
    flag: bool = False
    count: int = 7


class Body(msgspec.Struct):
    count: int = 1
    room: int | None = None
    share: float = 1.0
    flag: bool = False
    stop: str | list[str] | None = None
    ids: list[int | list[int]] | None = None
    flags: bool | list[bool] = False
    bias: dict[str, float] | None = None
    mode: Literal["a", "b"] = "a"
    effort: str | float | None = None
    inner: Inner | None = None
    inners: list[Inner] | None = None
    free: dict[str, Any] | None = None
    kind: str | None = msgspec.field(default=None, name="class")
    pair: tuple[int, ...] = ()
    weights: dict[int, float] | None = None


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"count": 4.0}, {"count": 4}),
        ({"count": "4"}, {"count": 4}),
        ({"room": -2.0, "share": 2}, {"room": -2, "share": 2.0}),
        ({"share": "0.5"}, {"share": 0.5}),
        ({"flag": 1}, {"flag": True}),
        ({"flag": "false"}, {"flag": False}),
        ({"ids": [1.0, "2"]}, {"ids": [1, 2]}),
        ({"ids": [[1.0], [2]]}, {"ids": [[1], [2]]}),
        ({"flags": [1, False]}, {"flags": [True, False]}),
        ({"bias": {"5": "1.5", "6": 2}}, {"bias": {"5": 1.5, "6": 2.0}}),
        ({"weights": {"5": "1.5"}, "pair": ["4", 5.0]}, {"weights": {5: 1.5}, "pair": (4, 5)}),
        ({"count": None, "share": None, "mode": None}, {"count": 1, "share": 1.0, "mode": "a"}),
        ({"inner": {"flag": None, "count": 2.0}}, {"inner": Inner(count=2)}),
        ({"inners": [{"flag": None}, {"count": None}]}, {"inners": [Inner(), Inner()]}),
        ({"stop": "4", "effort": "0.5"}, {"stop": "4", "effort": "0.5"}),
        ({"stop": "null", "count": 4.0}, {"stop": "null", "count": 4}),
        ({"count": "4", "unknown": "a text", "class": "x"}, {"count": 4, "kind": "x"}),
        (
            {"free": {"x": None, "y": 4.0, "z": {"w": None}}, "count": 4.0},
            {"free": {"x": None, "y": 4.0, "z": {"w": None}}},
        ),
    ],
)
def test_values_that_lose_nothing(given: Any, wanted: dict[str, Any]) -> None:
    read = convert_json(given, Body)
    for name, value in wanted.items():
        found = getattr(read, name)
        assert found == value and type(found) is type(value), name


@pytest.mark.parametrize(
    "given",
    [
        {"count": 4.5},
        {"count": True},
        {"count": "x"},
        {"count": ""},
        {"count": 1e300},
        {"count": "9" * 30},
        {"ids": ["9" * 30]},
        {"ids": [[1, "9" * 30]]},
        {"room": "null"},
        {"share": True},
        {"share": "much"},
        {"share": "nan"},
        {"share": "inf"},
        {"bias": {"5": "inf"}},
        {"weights": {"5": "inf"}},
        {"weights": {"5": 1.0, "05": 2.0}},
        {"pair": ["9" * 30]},
        {"inner": {"count": "9" * 30}},
        {"inners": [{"count": "9" * 30}]},
        {"flag": 2},
        {"flag": "yes"},
        {"stop": 4},
        {"stop": ["a", None]},
        {"mode": "c"},
        {"inner": {"count": 1.5}},
        {"free": "x"},
        [],
        5,
    ],
)
def test_values_that_may_mean_something_else_are_refused(given: Any) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"Expected|Invalid"):
        convert_json(given, Body)


def test_an_error_names_the_place() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"\$\.inner\.count"):
        convert_json({"count": 4.0, "inner": {"count": 1.5}}, Body)
