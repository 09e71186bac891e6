"""Demands on the weight version: what states one, and the verdict by what a run served before and serves now."""

from __future__ import annotations

import pytest

from verl_server.errors import BadRequestError, VersionBehindError, VersionSupersededError, WeightVersionError
from verl_server.version_demand import ServedVersions, read_demand
from verl_server.weight_version import satisfies

A, B, C = "aaaaaaaa", "bbbbbbbb", "cccccccc"

STATED = [
    (None, None, ""),
    (f"3@{A}", None, f">=3@{A}"),
    (None, f"3@{A}", f"3@{A}"),
    (None, "step 13", "step 13"),
    (None, ">=3", ">=3"),
]


@pytest.mark.parametrize(("minimum", "exact", "demand"), STATED)
def test_two_fields_state_one_demand(minimum: str | None, exact: str | None, demand: str) -> None:
    assert read_demand(minimum, exact) == demand


WRONG = [
    (f"3@{A}", f"3@{A}", "min_weight_version and exact_weight_version cannot both be set"),
    ("", "", "cannot both be set"),
    ("13", None, "'13' is a free label, and free labels have no order.*exact_weight_version"),
    (f">=3@{A}", None, "is a free label"),
    ("", None, "min_weight_version must have 1 to 256 characters, not 0"),
    (None, "", "exact_weight_version must have 1 to 256 characters, not 0"),
    (None, "x" * 257, "exact_weight_version must have 1 to 256 characters, not 257"),
    (None, f">=3@{A}", "is no label. Send min_weight_version"),
]


@pytest.mark.parametrize(("minimum", "exact", "message"), WRONG)
def test_what_states_no_demand_is_refused(minimum: str | None, exact: str | None, message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        read_demand(minimum, exact)
    with pytest.raises(BadRequestError, match=r"h[12]"):
        read_demand(minimum, exact, ("h1", "h2"))


HISTORY = ["default", f"1@{A}", f"2@{A}", "free", f"1@{B}"]
"""Labels that a run served, in order."""
TABLE = {
    "": ["ok"] * 5,
    "default": ["ok", "superseded", "superseded", "superseded", "superseded"],
    "free": ["behind", "behind", "behind", "ok", "superseded"],
    "other": ["behind"] * 5,
    f"1@{A}": ["behind", "ok", "superseded", "superseded", "superseded"],
    f"2@{A}": ["behind", "behind", "ok", "superseded", "superseded"],
    f"3@{A}": ["behind", "behind", "behind", "superseded", "superseded"],
    f">=1@{A}": ["behind", "ok", "ok", "superseded", "superseded"],
    f">=2@{A}": ["behind", "behind", "ok", "superseded", "superseded"],
    f">=3@{A}": ["behind", "behind", "behind", "superseded", "superseded"],
    f"0@{B}": ["behind"] * 4 + ["superseded"],
    f"1@{B}": ["behind"] * 4 + ["ok"],
    f">=0@{B}": ["behind"] * 4 + ["ok"],
    f">=2@{B}": ["behind"] * 5,
    f"1@{C}": ["behind"] * 5,
    f">=1@{C}": ["behind"] * 5,
}
"""Demand -> verdict after each label of `HISTORY`."""


@pytest.mark.parametrize("demand", TABLE)
@pytest.mark.parametrize("count", range(1, len(HISTORY) + 1))
def test_the_verdict_follows_from_what_was_served(demand: str, count: int) -> None:
    versions = ServedVersions(HISTORY[0])
    for label in HISTORY[1:count]:
        assert versions.note(label)
    verdict = TABLE[demand][count - 1]
    assert versions.judge(demand) == verdict
    assert (verdict == "ok") == (not demand or satisfies(versions.current, demand))
    kinds: dict[str, type[WeightVersionError] | None] = {
        "ok": None,
        "behind": VersionBehindError,
        "superseded": VersionSupersededError,
    }
    error = versions.refusal(demand)
    assert (None if error is None else type(error)) == kinds[verdict]
    if error is not None:
        stated = f"min_weight_version={demand[2:]!r}" if demand[:2] == ">=" else f"exact_weight_version={demand!r}"
        assert stated in str(error) and f"serves {versions.current!r}" in str(error)
        assert error.status_code == 409 and error.code == f"weight_version_{verdict}"


def test_a_label_that_is_served_again_is_not_superseded() -> None:
    versions = ServedVersions(f"5@{A}")
    versions.note(f"3@{A}")  # somebody loaded an older checkpoint
    assert versions.judge(f"3@{A}") == versions.judge(f">=2@{A}") == "ok"
    assert (
        versions.judge(f"5@{A}") == "superseded" and versions.judge(f"4@{A}") == versions.judge(f">=5@{A}") == "behind"
    )
    versions.note(f"5@{A}")
    assert versions.judge(f"5@{A}") == "ok"


def test_the_time_is_that_of_the_activation() -> None:
    now = 10.0
    versions = ServedVersions("default", lambda: now)
    now = 11.0
    assert not versions.note("default") and versions.since == 10.0
    assert versions.note("other") and (versions.current, versions.since) == ("other", 11.0)


def test_the_history_has_a_bound() -> None:
    versions = ServedVersions("label-0")
    for number in range(1, 3000):
        versions.note(f"label-{number}")
        versions.note(f"1@{number:08x}")
    assert versions.judge("label-2998") == versions.judge("1@00000bb6") == "superseded"
    assert versions.judge("label-3") == "behind", "forgotten"
    assert len(versions._labels) == len(versions._incarnations) == 1024
