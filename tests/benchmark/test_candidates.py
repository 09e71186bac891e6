"""`benchmarks.candidates` times the functions that a server calls, for outputs and for prompts."""

from __future__ import annotations

import pytest

from benchmarks import candidates
from tests.benchmark.lines import figures


@pytest.mark.exhaustive
def test_candidates(capsys: pytest.CaptureFixture[str]) -> None:
    candidates.main(["--counts", "0", "3", "--requests", "2", "--steps", "2", "--prompts", "2", "--prompt-len", "9"])
    found = figures(capsys)
    stages = ["read", "collect", "encode", "decode", "extend", "result", "json", "columnar", "front"]
    assert set(found) == {"run", *(f"{work}_{stage}" for work in ("output", "prompt") for stage in stages)}
    front = sum(found[f"output_{stage}"]["value"] for stage in ("decode", "extend", "result"))
    assert found["output_front"]["value"] == pytest.approx(front, abs=1e-3)
    assert found["output_read"]["candidates"] == 3 and found["prompt_read"]["tokens"] == 18
