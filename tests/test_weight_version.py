"""Versions of one incarnation are ordered. Those of two incarnations, and free labels, are not."""

from __future__ import annotations

import pytest

from verl_server.errors import BadRequestError
from verl_server.weight_version import WeightVersion, new_incarnation


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


@pytest.mark.parametrize(("number", "incarnation"), [(-1, "5f2c9a1e"), (10**18, "5f2c9a1e"), (1, "run"), (1, "")])
def test_what_has_no_label_is_no_version(number: int, incarnation: str) -> None:
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
