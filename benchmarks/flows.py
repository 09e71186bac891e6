"""Count the files, and the moves between rooms, that a reader of this project's flows comes across.

    python -m benchmarks.flows
    python -m benchmarks.flows --flows push --list
    python -m benchmarks.flows --http

The flows run on a tiny random model on the CPU, called on a `VerlEngine` of one trainer rank:

    generate   one call of `generate`
    push       `register_weights` of a new model, and two calls of `push_weights`
    episode    `AgentLoop` plays one episode of `examples/my_environment.py`

The engine runs in the trainer's process, or with `--http` in a server process. Each flow runs three times, and a call
counts if it occurs every time. What runs beside the flow (watching threads, the end of the start) thus rarely counts;
on a busy machine a figure may still differ by one or two.

A profile function in every thread of every process records which functions of `verl_server` are called. Calls before
and after the flow do not count (the start of the processes, for example), nor do module bodies.

`files` is the number of files with a called function. `moves` is the number of pairs (caller, callee) of functions
whose files are in different rooms. A room is a folder in `verl_server/`, or in `weight_sync/` and `backends/`, whose
subfolders belong to different processes. `room_pairs` is the number of pairs of rooms between which the moves lead.

Frames of other packages and module bodies between caller and callee are skipped. The caller must have been called in
the flow, too: a callback of an event loop that already ran has no caller. Modules that are directly in `verl_server/`,
such as `errors`, are files, but no move leads to them.

A count by hand, before this script existed, found 58 files and 14 moves for `generate`, and 65 files and 38 moves for
`push`. It left out the small objects that a call only passes.

Prints one JSON line for each flow. `--list` adds the names of the files and the moves.
"""

from __future__ import annotations

import contextlib
import copy
import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGE = f"{_ROOT / 'verl_server'}{os.sep}"
_FOLDER = "VERL_FLOWS_FOLDER"
"""Environment variable of the processes that record: the folder of the recordings."""
Flow = Literal["generate", "push", "episode"]
Call = tuple[str | None, str]
"""(caller, callee) as "FILE:FUNCTION", with the file's path in `verl_server`. The caller is None if there is none."""
FLOWS: tuple[Flow, ...] = ("generate", "push", "episode")
_REPEATS = 3
_TWO_LEVELS = (("weight_sync",), ("backends",))
"""Folders whose subfolders belong to different processes."""


@dataclass(frozen=True)
class Options:
    """Count the files and the moves of flows."""

    flows: tuple[Flow, ...] = FLOWS
    """Flows to run."""
    http: bool = False
    """Run the engine in a server process."""
    list: bool = False
    """Print the names of the files and the moves, too."""


# -- in the processes that record; this module imports only the standard library, because they import it at their start


class Recorder:
    """Writes each new (flow, caller, callee) of this process to a file of `folder`.

    All processes share the number of the current run of a flow, a byte of mapped memory; 0 means that nothing is
    recorded.
    """

    def __init__(self, folder: Path) -> None:
        with (folder / "flow").open("r+b") as file:
            self.flow = mmap.mmap(file.fileno(), 1)
        self._file = (folder / f"{os.getpid()}.calls").open("w", buffering=1)
        self._known: set[tuple[int, CodeType | None, CodeType]] = set()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        flow = self.flow[0]
        if flow and event == "call" and _is_counted(frame.f_code):
            caller = frame.f_back
            while caller is not None and not _is_counted(caller.f_code):
                caller = caller.f_back
            call = flow, caller and caller.f_code, frame.f_code
            if call not in self._known:
                self._known.add(call)
                print(json.dumps([flow, call[1] and _name(call[1]), _name(call[2])]), file=self._file)


def _is_counted(code: CodeType) -> bool:
    return code.co_filename.startswith(_PACKAGE) and code.co_name != "<module>"


def _name(code: CodeType) -> str:
    return f"{code.co_filename.removeprefix(_PACKAGE)}:{code.co_qualname}"


RECORDER = Recorder(Path(os.environ[_FOLDER])) if _FOLDER in os.environ else None


@contextlib.contextmanager
def recorded(flow: Flow, repeat: int) -> Iterator[None]:
    """Record the calls of all processes during the block."""
    assert RECORDER is not None
    RECORDER.flow[0] = 1 + FLOWS.index(flow) * _REPEATS + repeat
    try:
        yield
    finally:
        RECORDER.flow[0] = 0


def run_flows(flows: tuple[Flow, ...], http: bool, folder: Path) -> None:
    """Run the flows. The files of model and process group are written to `folder`."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoModelForCausalLM

    from verl_server import VerlEngine
    from verl_server.models.tiny import make_model_folder

    path = make_model_folder(folder / "model", "llama")
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1)
    settings: dict[str, Any] = {"model_path": str(path), "device": "cpu", "dtype": "float32", "kv_cache_gib": 0.05}
    mesh = init_device_mesh("cpu", (1,))
    with VerlEngine(mesh, launch_server=http, log_level="warning", **settings) as engine:
        for repeat in range(_REPEATS):
            if "generate" in flows:
                with recorded("generate", repeat):
                    engine.generate(f"1 + {repeat} =", {"max_new_tokens": 4})
            if "push" in flows:
                model = copy.deepcopy(model)
                with recorded("push", repeat):
                    engine.register_weights(model)
                    engine.push_weights()
                    engine.push_weights()
                engine.unregister_weights()
        if "episode" in flows:
            _play(engine, path)
    dist.destroy_process_group()


def _play(engine: Any, model: Path) -> None:
    from transformers import AutoTokenizer

    from verl_server.rollout.agent_loop import AgentLoop
    from verl_server.rollout.environments.env_server import EnvServer
    from verl_server.rollout.episode import Limits
    from verl_server.rollout.renderer import ChatRenderer
    from verl_server.rollout.trajectory import Task

    limits = Limits(max_turns=2, max_new_tokens=8)
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(model))
    environment = f"{_ROOT / 'examples' / 'my_environment.py'}:Countdown"
    with (
        EnvServer(environment) as env,
        AgentLoop(engine.url or engine.engine, env.url, renderer, limits=limits) as loop,
    ):
        for repeat in range(_REPEATS):
            with recorded("episode", repeat):
                loop.run([Task(seed=1)])


# -- in the process that counts --------------------------------------------------------------------------------


def record(flows: tuple[Flow, ...], http: bool) -> dict[Flow, set[Call]]:
    """Run the flows in other processes. Returns the calls of each flow."""
    with tempfile.TemporaryDirectory(prefix="verl-flows-") as name:
        folder = Path(name)
        (folder / "flow").write_bytes(b"\0")
        (folder / "sitecustomize.py").write_text("import benchmarks.flows\n")
        code = f"from benchmarks.flows import Path, run_flows; run_flows({flows!r}, {http}, Path({name!r}))"
        env = os.environ | {_FOLDER: name, "PYTHONPATH": f"{folder}{os.pathsep}{_ROOT}"}
        subprocess.run([sys.executable, "-c", code], env=env, check=True)
        runs: list[set[Call]] = [set() for _ in range(len(FLOWS) * _REPEATS)]
        for file in folder.glob("*.calls"):
            for number, caller, callee in map(json.loads, file.read_text().splitlines()):
                runs[number - 1].add((caller, callee))
        starts = {flow: FLOWS.index(flow) * _REPEATS for flow in flows}
        return {flow: set.intersection(*runs[start : start + _REPEATS]) for flow, start in starts.items()}


def files_of(calls: Iterable[Call]) -> list[str]:
    """Return the files with a called function, sorted."""
    return sorted({callee.partition(":")[0] for _, callee in calls})


def moves_of(calls: Iterable[Call]) -> list[Call]:
    """Return the calls from one room to another, sorted."""
    calls = list(calls)
    called = {callee for _, callee in calls}
    return sorted(
        (caller, callee)
        for caller, callee in calls
        if caller in called and len({_room(caller), _room(callee), ""}) == 3
    )


def _room(function: str) -> str:
    folders = Path(function.partition(":")[0]).parts[:-1]
    return "/".join(folders[: 2 if folders[:1] in _TWO_LEVELS else 1])


def main() -> None:
    import tyro

    options = tyro.cli(Options, description=__doc__)
    for flow, calls in record(options.flows, options.http).items():
        files, moves = files_of(calls), moves_of(calls)
        line: dict[str, Any] = {"name": flow, "files": len(files), "moves": len(moves), "http": options.http}
        line["room_pairs"] = len({(_room(caller or ""), _room(callee)) for caller, callee in moves})
        lists = {"file_names": files, "move_calls": [f"{caller} -> {callee}" for caller, callee in moves]}
        print(json.dumps(line | (lists if options.list else {})), flush=True)


if __name__ == "__main__":
    main()
