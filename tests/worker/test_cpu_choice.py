"""The choice of CPU kernels is measured once and kept in a file, which several processes may write and all read."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_server.errors import BadRequestError
from verl_server.worker import cpu_choice
from verl_server.worker.cpu_choice import CpuChoice, choose_on_cpu, counts, make_choice

SHAPES = [(8, 4), (16, 8)]


def choice(first: str = "torch") -> CpuChoice:
    return make_choice({shape: [first, "cpp", "cpp", "torch"] for shape in SHAPES}, "cpp", ["torch", "cpp"])


class Measuring:
    """A measurement that counts its calls. Each call returns another choice than the call before."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> CpuChoice:
        self.times += 1
        return choice("torch" if self.times % 2 else "onednn")


def cached(folder: Path | None, measure: Callable[[], CpuChoice], made_of: str = "this machine") -> CpuChoice:
    return choose_on_cpu(None, folder, made_of, SHAPES, measure)


def test_names_are_for_counts_up_to_a_power_of_two() -> None:
    assert counts(512) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    found = choice()
    assert found.linears(SHAPES) == {shape: ["torch", "cpp", "cpp", "torch"] for shape in SHAPES}
    assert [found.attends(n) for n in (0, 1, 2, 3, 1000)] == [True, False, True, True, True]
    assert "8x4 torch from 1, cpp from 2, torch from 5" in str(found)


def test_measured_once_then_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    measure = Measuring()
    with caplog.at_level(logging.INFO):
        first, second = cached(tmp_path, measure), cached(tmp_path, measure)
    assert first == second and measure.times == 1
    (file,) = tmp_path.iterdir()
    assert caplog.text.count(str(file)) == 2 and "measured before" in caplog.text and "8x4 torch from 1" in caplog.text
    cached(tmp_path, measure, "another machine")
    assert measure.times == 2 and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"products": {}, "prompts": "cpp", "decodes": ["magic"]}'])
def test_a_broken_file_in_the_cache_is_replaced(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    measure = Measuring()
    cached(tmp_path, measure)
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        replaced = cached(tmp_path, measure)
    assert "is measured anew" in caplog.text
    assert cached(tmp_path, measure) == replaced and measure.times == 2


def test_of_two_first_starts_one_choice_wins(tmp_path: Path) -> None:
    """Two processes measure at once, and the later one takes the earlier one's choice.

    All later starts then compute the same bits.
    """
    winner: list[CpuChoice] = []

    def measure_late() -> CpuChoice:
        winner.append(cached(tmp_path, choice))
        return choice("onednn")

    assert cached(tmp_path, measure_late) == winner[0] == choice()
    assert len(list(tmp_path.iterdir())) == 1


def test_without_a_cache_each_start_measures(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    measure = Measuring()
    cached(None, measure)
    with caplog.at_level(logging.WARNING):
        cached(tmp_path / "missing", measure)
    assert measure.times == 2 and "could not be kept" in caplog.text


def test_a_named_file_is_written_once_and_then_decides(tmp_path: Path) -> None:
    measure, file = Measuring(), tmp_path / "choice.json"
    first = choose_on_cpu(file, tmp_path, "", SHAPES, measure)
    assert choose_on_cpu(file, None, "elsewhere", SHAPES, measure) == first and measure.times == 1
    assert [path.name for path in tmp_path.iterdir()] == ["choice.json"]
    edited = json.loads(file.read_text())
    edited["products"]["8x4"] = ["cpp"]
    file.write_text(json.dumps(edited))
    assert choose_on_cpu(file, None, "", SHAPES, measure).linears(SHAPES)[8, 4] == ["cpp"]


def test_a_named_file_of_no_use_is_refused_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "choice.json"
    file.write_text("{")
    with pytest.raises(BadRequestError, match=r"choice\.json' cannot be used: .* Name a file that does not exist"):
        choose_on_cpu(file, None, "", SHAPES, Measuring())
    assert file.read_text() == "{"
    choose_on_cpu(tmp_path / "other.json", None, "", SHAPES, choice)
    with pytest.raises(BadRequestError, match="it has no kernels for 99x99"):
        choose_on_cpu(tmp_path / "other.json", None, "", [*SHAPES, (99, 99)], Measuring())
    with pytest.raises(BadRequestError, match="cannot be written"):
        choose_on_cpu(tmp_path / "no" / "folder.json", None, "", SHAPES, choice)


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("links are not supported")

    monkeypatch.setattr(cpu_choice.os, "link", refuse)
    measure = Measuring()
    assert cached(tmp_path, measure) == cached(tmp_path, measure) and measure.times == 1
