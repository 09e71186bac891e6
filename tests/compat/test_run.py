"""The page that `make test-compat` writes."""

from __future__ import annotations

from typing import Any

from tests.compat.run import TESTS, page


def record(exercised: str, result: str, way: str = "server", not_routed: str | None = None) -> dict[str, Any]:
    named = {"client": "c", "version": "1.2", "exercised": exercised, "result": result, "seconds": 30.0}
    return named | {"way": way, "not_routed": not_routed}


def test_the_kits_have_a_row_each_with_what_does_not_pass() -> None:
    results = {name: [record("Says a|b.", "passed")] for name in TESTS}
    results["kits"] = [
        record("Kit.test_a", "passed", "router"),
        record("Kit.test_b", "refused: c", "router"),
        record("Other.test", "passed", "router"),
    ]
    lines = page(results).splitlines()
    assert lines.count(r"| c | 1.2 | Says a\|b. | passed | - |") == len(TESTS) - 1
    assert lines[-2:] == ["| `Kit` | 1 of 2 | `test_b`: refused: c |", "| `Other` | 1 of 1 |  |"]
    text = " ".join(lines)
    assert "SGLang 1.2 ships" in text and "2 of 3 pass" in text and "1.5 minutes" in text
    assert "against the router in front of a server" in text


def test_each_row_has_both_ways_or_its_client_a_reason() -> None:
    results = {name: [] for name in TESTS} | {
        "clients": [record("Says a.", "passed"), record("Says a.", "failed", "router")],
        "frameworks": [record("Launches.", "passed", not_routed="it launches")],
    }
    lines = page(results).splitlines()
    assert "| c | 1.2 | Says a. | passed | failed |" in lines and "| c | 1.2 | Launches. | passed | - |" in lines
    assert lines[-1] == "- c: it launches."
