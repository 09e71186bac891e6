"""The line of the fleet moves by majority or by the trainer's word. Within it, all must have a committed version."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from verl_server.fleet.versions import FleetVersions

OLD, NEW, STRAY = "0000000a", "0000000b", "0000000c"
STALE_AFTER = 10.0


@dataclass
class Step:
    """What the servers a, b and c serve ("." does not answer, "!" answers with unconfirmed weights), and what follows.

    Numbers are versions of OLD, numbers with ' those of NEW, other texts are free labels.
    """

    served: str
    committed: str | None
    fit: str
    """The servers that get new work."""
    seconds: float = 1.0
    """Time since the step before."""
    commit: str | None = None
    """Label that the trainer commits after the look."""
    lags: tuple[int, ...] = ()
    spread: float | None = None
    names: list[str] = field(default_factory=lambda: ["a", "b", "c"])


def label(text: str) -> str:
    if text.isdecimal():
        return f"{text}@{OLD}"
    if text.endswith("'"):
        return f"{text[:-1]}@{NEW}"
    return f"{text[:-1]}@{STRAY}" if text.endswith('"') else text


SCENARIOS: dict[str, list[Step]] = {
    "a push reaches one server after the other": [
        Step("5 5 5", "5", "abc", spread=0.0),
        Step("6 5 5", "5", "abc", lags=(0, 1, 1)),
        Step("6 6 5", "5", "abc", seconds=2),
        Step("6 6 6", "6", "abc", lags=(0, 0, 0), spread=3.0),
    ],
    "a server that stays behind is left out, and comes back": [
        Step("6 6 5", "5", "abc"),
        Step("6 6 5", "5", "abc", seconds=STALE_AFTER),
        Step("6 6 5", "6", "ab", seconds=0.1),
        Step("7 7 5", "7", "ab", lags=(0, 0, 2)),
        Step("7 7 7", "7", "abc"),
    ],
    "the trainer says that the push is over": [
        Step("6 6 5", "6", "ab", commit="6", spread=0.0),
        Step("6 6 5", "6", "ab"),
        Step("6 6 6", "6", "abc"),
        Step("7 6 6", "6", "abc"),
        Step("7 7 7", "7", "abc"),
    ],
    "a server that was away during the push returns with old weights": [
        Step("5 5 5", "5", "abc"),
        Step("6 6 .", "6", "ab"),
        Step("6 6 5", "6", "ab"),
        Step(". . 5", "6", ""),
        Step("! ! 5", "6", ""),
        Step("6 . 5", "6", "a"),
    ],
    "the first server with a version dies during the push": [
        Step("5 5 5", "5", "abc"),
        Step("6 5 5", "5", "abc"),
        Step(". 5 5", "5", "bc"),
        Step(". 5 5", "5", "bc", seconds=10 * STALE_AFTER),
        Step(". 6 6", "6", "bc"),
    ],
    "a stray that was healed by hand does not move the fleet": [
        Step("5 5 5", "5", "abc"),
        Step('5 5 1"', "5", "ab"),
        Step('5 5 2"', "5", "ab", seconds=10 * STALE_AFTER),
        Step('. . 2"', "5", ""),
        Step('5 . 2"', "5", "a"),
        Step("5 5 5", "5", "abc"),
    ],
    "a resumed run pushes to one server after the other": [
        Step("9 9 9", "9", "abc"),
        Step("1' 9 9", "9", "bc"),
        Step("1' 1' 9", "1'", "ab"),
        Step("1' 1' 1'", "1'", "abc"),
        Step("2' 1' 1'", "1'", "abc"),
    ],
    "a resumed run that commits": [
        Step("9 9 9", "9", "abc"),
        Step("1' 9 9", "1'", "a", commit="1'"),
        Step("1' 9 9", "1'", "a", seconds=0),
        Step(". 9 9", "1'", ""),
        Step("! 9 9", "1'", ""),
        Step("1' 9 .", "1'", "a"),
        Step("2' 1' 9", "1'", "ab"),
    ],
    "an old commit that comes late changes nothing": [
        Step("6 6 6", "6", "abc"),
        Step("7 6 6", "6", "abc", commit="6"),
        Step("7 7 7", "7", "abc"),
    ],
    "all servers have older weights than before": [
        Step("6 6 6", "6", "abc"),
        Step("3 3 3", "3", "abc"),
        Step("4 3 3", "3", "abc"),
    ],
    "a rollback to a free label": [
        Step("6 6 6", "6", "abc"),
        Step("safe 6 6", "6", "bc"),
        Step("safe safe 6", "safe", "ab"),
        Step("safe safe safe", "safe", "abc", lags=(0, 0, 0)),
    ],
    "free labels have no order": [
        Step("x x x", "x", "abc"),
        Step("y x x", "x", "bc"),
        Step("y x x", "x", "bc", seconds=10 * STALE_AFTER),
        Step("y x x", "y", "a", commit="y"),
        Step("y x x", "y", "a"),
        Step("y y x", "y", "ab"),
        Step("x y x", "y", "b"),
        Step("x x x", "x", "abc"),
    ],
    "all servers are lost, and come back": [
        Step("5 5 5", "5", "abc"),
        Step(". . .", "5", ""),
        Step("! . .", "5", ""),
        Step("! ! !", "5", ""),
        Step("6 ! !", "6", "a"),
        Step("6 6 6", "6", "abc"),
    ],
    "a run that was resumed after all servers were lost": [
        Step("5 5 5", "5", "abc"),
        Step("! ! !", "5", ""),
        Step("1' ! !", "1'", "a"),
        Step("1' 1' 1'", "1'", "abc"),
    ],
    "a router that starts in the middle of a push": [
        Step("6 5 5", "5", "abc"),
        Step("6 6 6", "6", "abc"),
    ],
    "a router that starts while a resumed run pushes": [
        Step("1' 9 9", "9", "bc"),
        Step("1' 1' 9", "1'", "ab"),
    ],
    "a router that starts before any push": [
        Step("! ! !", None, ""),
        Step("1 ! !", "1", "a"),
        Step("1 1 1", "1", "abc"),
    ],
    "two servers": [
        Step("5 5", "5", "ab", names=["a", "b"]),
        Step("1' 5", "5", "b", names=["a", "b"]),
        Step("1' .", "5", "", names=["a", "b"]),
        Step("1' !", "1'", "a", names=["a", "b"]),
        Step("1' 1'", "1'", "ab", names=["a", "b"]),
        Step("2' 1'", "2'", "a", names=["a", "b"], commit="2'"),
    ],
    "the largest part is no majority": [
        Step("5 5 5 5 5", "5", "abcde", names=list("abcde")),
        Step("5 x 5 5 y", "5", "acd", names=list("abcde")),
        Step(". . 1' 1' y", "5", "", names=list("abcde")),
        Step(". . 1' 1' 1'", "1'", "cde", names=list("abcde")),
    ],
    "one server": [
        Step("5", "5", "a", names=["a"]),
        Step("6", "6", "a", names=["a"]),
        Step("1'", "1'", "a", names=["a"]),
        Step("!", "1'", "", names=["a"]),
        Step("x", "x", "a", names=["a"]),
    ],
}


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_the_version_of_the_fleet(name: str) -> None:
    versions, now = FleetVersions(STALE_AFTER), 100.0
    for number, step in enumerate(SCENARIOS[name]):
        now += step.seconds
        texts = dict(zip(step.names, step.served.split(), strict=True))
        served = {server: label(text) for server, text in texts.items() if text not in ".!"}
        silent = [server for server, text in texts.items() if text == "."]
        versions.note(served, now, silent, is_complete=len(served) == len(texts))
        case = (name, number, step)
        if step.commit is not None:
            assert versions.commit(label(step.commit), now), case
        assert versions.committed == (None if step.committed is None else label(step.committed)), case
        assert "".join(each for each in served if versions.fault(each, now) is None) == step.fit, case
        if step.lags:
            assert tuple(map(versions.lag, step.names)) == step.lags, case
        if step.spread is not None:
            assert versions.last_spread == (versions.newest, step.spread), case


def test_a_label_that_no_server_has_is_not_committed() -> None:
    versions = FleetVersions(STALE_AFTER)
    assert not versions.commit(label("5"), 0.0)
    versions.note({"a": label("5")}, 1.0)
    assert not versions.commit(label("6"), 1.0) and versions.committed == label("5")


def test_a_fault_says_what_is_served_and_what_to_do() -> None:
    versions = FleetVersions(STALE_AFTER)
    versions.note({"a": label("5"), "b": label("5"), "c": label("1'")}, 1.0)
    text = versions.fault("c", 1.0) or ""
    assert label("1'") in text and label("5") in text and "POST /fleet/commit" in text
    assert versions.fault("nobody", 1.0) is None
