"""Versions of one incarnation are ordered. Those of two incarnations, and free labels, are not."""

from __future__ import annotations

from typing import Any

import pytest

from verl_server.errors import BadRequestError
from verl_server.weight_version import WeightVersion, at_least, label_of, new_incarnation, satisfies


def test_the_label_is_number_at_incarnation() -> None:
    version = WeightVersion(13, "5f2c9a1e")
    assert str(version) == "13@5f2c9a1e"
    assert WeightVersion.parse("13@5f2c9a1e") == version
    assert WeightVersion.parse(str(WeightVersion(0, new_incarnation()))) is not None
    assert str(version.next()) == "14@5f2c9a1e"


FREE = ["", "13", "default", "step-13", "013@5f2c9a1e", "-1@5f2c9a1e", "13@5F2C9A1E", "13@5f2c9a1", "13@5f2c9a1e\n"]
FREE += ["13@5f2c9a1e0", "1" * 19 + "@5f2c9a1e", "²@5f2c9a1e", "unnumbered-1@5f2c9a1e"]


@pytest.mark.parametrize("label", FREE)
def test_every_other_text_is_a_free_label(label: str) -> None:
    assert WeightVersion.parse(label) is None


WRONG = [(-1, "5f2c9a1e"), (10**18, "5f2c9a1e"), (1, "run"), (1, ""), ("13", "5f2c9a1e"), (True, "5f2c9a1e")]


@pytest.mark.parametrize(("number", "incarnation"), WRONG)
def test_what_has_no_label_is_no_version(number: Any, incarnation: str) -> None:
    with pytest.raises(BadRequestError, match="is no weight version"):
        WeightVersion(number, incarnation)


def test_versions_of_one_incarnation_are_ordered_by_number() -> None:
    versions = [WeightVersion(number, "5f2c9a1e") for number in (10, 9, 100)]
    assert [version.number for version in sorted(versions)] == [9, 10, 100]
    assert versions[1] < versions[0] <= versions[2]
    assert max(versions) is versions[2]


def test_versions_of_two_incarnations_have_no_order() -> None:
    lost, new = WeightVersion(13, "aaaaaaaa"), WeightVersion(13, "bbbbbbbb")
    assert lost != new
    for compare in (lambda: lost < new, lambda: lost >= new, lambda: max(lost, new), lambda: sorted([lost, new])):
        with pytest.raises(BadRequestError, match=r"13@.* have no order: they are of two incarnations"):
            compare()


def test_a_free_label_has_no_order() -> None:
    with pytest.raises(TypeError):
        WeightVersion(13, "aaaaaaaa") < "14"  # type: ignore[operator]  # noqa: B015


def test_two_starts_draw_two_incarnations() -> None:
    assert len({new_incarnation() for _ in range(100)}) == 100


def test_a_callers_version_keeps_its_text_or_is_refused() -> None:
    given = ["13", "013@5f2c9a1e", "", 13, WeightVersion(13, "5f2c9a1e"), None]
    assert [label_of(version) for version in given] == ["13", "013@5f2c9a1e", "", "13", "13@5f2c9a1e", None]
    for wrong in (b"13", True, 1.5, ["13"]):
        with pytest.raises(BadRequestError, match="A weight version is a text, an integer or a WeightVersion"):
            label_of(wrong)  # type: ignore[arg-type]


DEMANDS = [
    ("13@5f2c9a1e", "13@5f2c9a1e", True),
    ("14@5f2c9a1e", "13@5f2c9a1e", False),
    ("13@5f2c9a1e", ">=13@5f2c9a1e", True),
    ("14@5f2c9a1e", ">=13@5f2c9a1e", True),
    ("100@5f2c9a1e", ">=13@5f2c9a1e", True),
    ("12@5f2c9a1e", ">=13@5f2c9a1e", False),
    ("14@aaaaaaaa", ">=13@5f2c9a1e", False),
    ("step-14", ">=13@5f2c9a1e", False),
    (None, ">=13@5f2c9a1e", False),
    (None, "13@5f2c9a1e", False),
    ("step-14", "step-14", True),
    (">=step-14", ">=step-14", True),  # a free label that looks like a demand names itself
    ("step-15", ">=step-14", False),
]


@pytest.mark.parametrize(("served", "demand", "expected"), DEMANDS)
def test_weights_satisfy_a_label_or_at_least_a_version(served: str | None, demand: str, expected: bool) -> None:
    assert satisfies(served, demand) is expected


def test_a_version_satisfies_at_least_itself_and_those_before() -> None:
    version = WeightVersion(3, new_incarnation())
    assert at_least(version) == f">={version}"
    assert satisfies(str(version), at_least(version)) and satisfies(str(version.next()), at_least(version))
    assert not satisfies(str(version), at_least(version.next()))
