"""What users return is written as JSON, also where JSON has no such type."""

from __future__ import annotations

import collections
import decimal
import enum
import fractions
import pathlib
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from verl_server.files.json_values import dumps, jsonable

Point = collections.namedtuple("Point", "x y")


class Colour(enum.Enum):
    RED = "red"


class Inner(msgspec.Struct):
    values: set[int]


class Model:
    """Looks like a model of pydantic."""

    def model_dump(self, mode: str) -> dict[str, str]:
        return {"mode": mode}


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (range(3), "[0,1,2]"),
        ({3, 1}, "[1,3]"),
        (frozenset({"b", "a"}), '["a","b"]'),
        (torch.tensor(0.5), "0.5"),
        (torch.tensor([True]), "[true]"),
        (torch.ones(1, 2, dtype=torch.bfloat16), "[[1.0,1.0]]"),
        (torch.Size([2, 3]), "[2,3]"),
        (np.float16(1.5), "1.5"),
        (np.arange(4).reshape(2, 2).T, "[[0,2],[1,3]]"),
        (collections.deque([1]), "[1]"),
        (collections.Counter("aa"), '{"a":2}'),
        ({"k": 1}.keys(), '["k"]'),
        (Point(1, 2), "[1,2]"),
        (pathlib.PurePosixPath("/a"), '"/a"'),
        (b"abc", '"abc"'),
        (Colour.RED, '"red"'),
        (decimal.Decimal("1.5"), "1.5"),
        (fractions.Fraction(1, 2), "0.5"),
        ({1: {"deep": [{range(2)}]}}, '{"1":{"deep":[[[0,1]]]}}'),
        (Inner({1}), '{"values":[1]}'),
        (10**30, "1" + 30 * "0"),
        (collections.UserString("a"), '"a"'),
        ({"k": 1}.values(), "[1]"),
        (Model(), '{"mode":"json"}'),
    ],
)
def test_values_are_written(value: Any, written: str) -> None:
    assert dumps(value).decode() == written
    assert dumps({"a": [value]}).decode() == f'{{"a":[{written}]}}'


@pytest.mark.parametrize("value", [object(), b"\xff", {(1, 2): 3}, (i for i in ()), len, 1j, torch.float32])
def test_what_is_no_value_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        dumps(value)


def test_the_hook_serves_other_encoders() -> None:
    assert msgspec.json.encode({"a": range(2)}, enc_hook=jsonable) == b'{"a":[0,1]}'
