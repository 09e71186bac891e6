"""Runs parts as processes, and keeps their lines in the file `--out`, so that a run can be resumed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.gates.figures import Lines
from benchmarks.gates.parts import Part
from benchmarks.processes import has_ended, process_tree
from verl_server.worker.gpu_holders import holders_sentence

_TAIL = 16_000
"""Characters of a failed part's stderr that are kept: with the stacks of all processes, if it was late."""
_DUMP_SECONDS = 5.0
"""Most time for the processes of a part that is late to write their stacks to stderr. Then all are killed."""


def run_part(part: Part, device: str, out: Path, bound: float | None = None, python: str = sys.executable) -> bool:
    """Run the part with `python`, at most `bound` seconds (its own bound), and append its lines to `out`.

    Returns True if its exit status is 0. The last line, "part_end", has the exit status, whether the part was killed at
    its bound, its seconds, and the end of its stderr if it failed.
    """
    start = time.monotonic()
    command = [python, "-m", *f"benchmarks.{part.command} --device {device}".split()]
    is_late = threading.Event()
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"PYTHONFAULTHANDLER": "1"},  # its children inherit it
            start_new_session=True,  # so that its children end with it
        ) as process,
    ):
        timer = threading.Timer(part.bound if bound is None else bound, _end, (process, is_late))
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                write_line(out, {"part": part.name} | _parsed(line))
            code = process.wait()
        except BaseException:  # such as an interrupt, which does not reach a session of its own
            _kill(process)
            raise
        finally:
            timer.cancel()
        errors.seek(0)
        tail = _without_modules(errors.read())[-_TAIL:]
    end = {"code": code, "timed_out": is_late.is_set(), "seconds": round(time.monotonic() - start, 1)}
    write_line(out, {"part": part.name, "name": "part_end"} | end | ({"stderr": tail} if code else {}))
    return code == 0


def _end(process: subprocess.Popen[str], is_late: threading.Event) -> None:
    """Let each process of the part write the stacks of its threads, then kill all.

    All stop first, so that no parent acts on the end of its child. They write one after the other, because all write to
    one file, and children first, because many of them end with their parent.
    """
    is_late.set()
    deadline = time.monotonic() + _DUMP_SECONDS
    processes = process_tree(process.pid)
    for pid in processes:
        _send(pid, signal.SIGSTOP)
    for pid in reversed(processes):
        _send(pid, signal.SIGABRT)  # the fault handler writes the stacks, and the process ends
        _send(pid, signal.SIGCONT)
        while not has_ended(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
    _kill(process)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _without_modules(errors: str) -> str:
    """The text without the list of extension modules that the fault handler writes after the stacks of a process."""
    return "".join(line for line in errors.splitlines(keepends=True) if not line.startswith("Extension modules:"))


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill the process and the children of its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # all have ended
        return


def leave_part(part: Part, out: Path, reason: str, is_failure: bool) -> None:
    """Note in `out` that the part was not run."""
    write_line(out, {"part": part.name, "name": "part_left", "reason": reason, "failure": is_failure})


def is_installed(package: str) -> bool:
    """Return True if there is such a package. A mere folder of this name, without a module, has no origin."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _parsed(line: str) -> dict[str, Any]:
    """A line of a benchmark as an object. A line that is not an object, as a library may print it, becomes a note."""
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        found = None
    return found if isinstance(found, dict) else {"name": "note", "text": line.rstrip()}


def write_line(out: Path, line: dict[str, Any]) -> None:
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")


def read_lines(out: Path) -> Lines:
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return {(line.get("part", ""), line["name"]): line for line in lines if "name" in line}


def parts_to_run(
    parts: list[Part], only: list[str] | None, is_long: bool, lines: Lines, needs: str | None = None
) -> list[Part]:
    """The parts that `only` names; without `only`, the parts that have not succeeded yet.

    `needs`: only the parts, long ones too, that need this package.
    """
    if only is not None:
        return [part for part in parts if part.name in only]
    chosen = [part for part in parts if (part.needs == needs if needs else is_long or not part.is_long)]
    return [part for part in chosen if lines.get((part.name, "part_end"), {}).get("code") != 0]


def find_card(gpus: int) -> str:
    """The name of the GPUs, as torch prints it; with `gpus` = 0, that of the CPU. Raises RuntimeError if they are
    missing or of several kinds."""
    if gpus == 0:
        from verl_server.models.ops import CPU_NAME

        return CPU_NAME
    names = [name for name, _ in _gpus()[:gpus]]
    if len(names) < gpus:
        raise RuntimeError(f"--gpus {gpus} needs as many NVIDIA GPUs, but torch sees {len(names)}.")
    if len(set(names)) > 1:
        raise RuntimeError(f"--gpus {gpus} needs GPUs of one kind, but torch sees {', '.join(names)}.")
    return names[0]


def find_uuids(gpus: int) -> list[str]:
    """The UUIDs of the first `gpus` GPUs that torch sees, for `held_by_others`."""
    return [uuid for _, uuid in _gpus()[:gpus]] if gpus else []


def held_by_others(uuids: list[str], patience: float = 10.0) -> str:
    """A sentence about the processes that hold memory of these GPUs, "" if there are none after `patience` seconds.

    Called between parts, whose last processes may take seconds to end. Figures beside other programs cannot be
    compared: these take time of the GPU, and the engine captures fewer graphs in the memory that they leave.
    """
    deadline = time.monotonic() + patience
    while True:
        found = " ".join(f"GPU {uuid}: {held}" for uuid in uuids if (held := holders_sentence(uuid)))
        if not found or time.monotonic() >= deadline:
            return found
        time.sleep(0.5)


def _gpus() -> list[tuple[str, str]]:
    """(name, UUID) of each GPU that torch sees. In another process: a CUDA context here would take memory of a GPU."""
    code = "import json, torch; of = torch.cuda.get_device_properties; n = torch.cuda.device_count(); "
    code += "print(json.dumps([(of(i).name, str(of(i).uuid)) for i in range(n)]))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    return [(name, uuid) for name, uuid in json.loads(done.stdout)]
