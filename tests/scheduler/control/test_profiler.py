"""Recording steps with torch's profiler: where traces may go, and when a recording ends."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.fakes import Harness
from verl_server.messages.io_struct import StartProfileReq, StopProfileReq
from verl_server.scheduler.control.profiler import StepProfiler


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeProfile:
    """Stands for torch's profiler: records nothing, and writes an empty trace."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.recording = False

    def start(self) -> None:
        self.recording = True

    def stop(self) -> None:
        self.recording = False

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text("{}")


@pytest.fixture
def profiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StepProfiler:
    monkeypatch.setattr(StepProfiler, "_make", lambda self, req: FakeProfile())
    return StepProfiler(str(tmp_path), "cpu", Clock())


def traces(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.trace.json.gz"))


def test_a_recording_is_written_when_it_is_stopped(profiler: StepProfiler, tmp_path: Path) -> None:
    reply = profiler.handle(StartProfileReq(id=4, output_dir=str(tmp_path / "run"), profile_prefix="warm"))
    assert (reply.id, reply.success) == (4, True)
    profiler.step()
    assert not traces(tmp_path)
    assert profiler.handle(StopProfileReq()).success
    (name,) = traces(tmp_path / "run")
    assert name.startswith("warm-") and name.endswith("-TP-0.trace.json.gz")


def test_a_recording_ends_after_its_steps_or_its_time(profiler: StepProfiler, tmp_path: Path) -> None:
    profiler.handle(StartProfileReq(num_steps=2))
    profiler.step()
    profiler.step()
    assert not traces(tmp_path), "two steps are being recorded"
    profiler.step()
    (name,) = traces(tmp_path)
    assert name in profiler.handle(StopProfileReq()).message, "a stop that comes later names the trace"
    assert profiler.handle(StopProfileReq()).status_code == 400
    profiler.handle(StartProfileReq())
    profiler._clock.now = 61.0  # type: ignore[attr-defined]
    profiler.step()
    assert len(traces(tmp_path)) == 2


@pytest.mark.parametrize("folder", ["/", "/tmp", "..", "inside/../../x"])
def test_traces_stay_in_the_operators_folder(profiler: StepProfiler, tmp_path: Path, folder: str) -> None:
    reply = profiler.handle(StartProfileReq(output_dir=str(tmp_path / folder)))
    assert reply.status_code == 400 and "profile_folder" in reply.message


def test_wrong_orders_and_a_missing_folder_are_refused(profiler: StepProfiler) -> None:
    assert "Nothing is being recorded" in profiler.handle(StopProfileReq()).message
    assert profiler.handle(StartProfileReq()).success
    assert "under way" in profiler.handle(StartProfileReq()).message
    off = StepProfiler(None, "cpu", Clock())
    assert (
        off.handle(StartProfileReq()).status_code == 400 and "profile_folder" in off.handle(StartProfileReq()).message
    )
    off.step()


def test_a_recording_on_the_cpu_has_no_gpu(tmp_path: Path) -> None:
    profiler = StepProfiler(str(tmp_path), "cpu", Clock())
    assert "needs a GPU" in profiler.handle(StartProfileReq(activities=["GPU"])).message


def test_a_failure_to_write_is_answered_and_ends_the_recording(
    profiler: StepProfiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: FakeProfile, path: str) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(FakeProfile, "export_chrome_trace", fail)
    profiler.handle(StartProfileReq())
    reply = profiler.handle(StopProfileReq())
    assert reply.status_code == 500 and "No space left" in reply.message
    assert profiler.handle(StartProfileReq(num_steps=1)).success
    profiler.step()
    profiler.step()
    assert "Nothing is being recorded" in profiler.handle(StopProfileReq()).message


def test_steps_of_a_scheduler_are_in_the_trace(tmp_path: Path) -> None:
    h = Harness(profile_folder=str(tmp_path))
    h.scheduler.handle(StartProfileReq(id=1, num_steps=2))
    h.add("a", [1, 2, 3], 5)
    h.run()
    assert h.replies[1].success and len(h.tokens["a"]) == 5
    (path,) = tmp_path.glob("*.trace.json.gz")
    assert "traceEvents" in json.loads(gzip.decompress(path.read_bytes()))
