"""The page that `make test-compat` writes."""

from __future__ import annotations

from typing import Any

from tests.compat.run import TESTS, page


def record(exercised: str, result: str) -> dict[str, Any]:
    return {"client": "c", "version": "1.2", "exercised": exercised, "result": result, "seconds": 30.0}


def test_the_kits_have_a_row_each_with_what_does_not_pass() -> None:
    results = {name: [record("Says a|b.", "passed")] for name in TESTS}
    results["kits"] = [
        record("Kit.test_a", "passed"),
        record("Kit.test_b", "refused: c"),
        record("Other.test", "passed"),
    ]
    lines = page(results).splitlines()
    assert lines.count(r"| c | 1.2 | Says a\|b. | passed |") == len(TESTS) - 1
    assert lines[-2:] == ["| `Kit` | 1 of 2 | `test_b`: refused: c |", "| `Other` | 1 of 1 |  |"]
    text = " ".join(lines)
    assert "SGLang 1.2 ships" in text and "2 of 3 pass" in text and "1.5 minutes" in text
