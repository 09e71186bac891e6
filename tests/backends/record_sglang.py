"""Records what a genuine SGLang answers: `python -m tests.backends.record_sglang --device cpu`.

Each line of the file is an exchange: "what" names it, with "arguments", and "answer" or "error". "note" says what
follows for this package. `test_sglang_recordings` reads the file, so that the recording of another version of SGLang
shows what changed. Each part runs in a process of its own, because a fault ends SGLang and the process that holds it.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch

from tests.backends.launched import launched
from verl_server.models.tiny import make_model_folder

HOOK = "tests.backends.record_sglang.hook"
_HOOK_FILE = "VERL_SERVER_TEST_HOOK_FILE"
PART_SECONDS = 300
"""Most seconds of a part. A server on a CPU takes a minute to start, and another one to end after a fault."""
PROMPT = list(range(10, 50))
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 6}
_LONG = 4000
_MOST = 1500
"""Most characters of an answer or an error that are kept."""


def hook(model: Any, named_tensors: Any) -> Any:
    """SGLang's `custom_weight_loader`: write down what arrives. The name of the first tensor says what else to do."""
    tensors = list(named_tensors)
    facts = {
        "model": f"{type(model).__module__}.{type(model).__name__}",
        "container": type(named_tensors).__name__,
        "entries": [type(entry).__name__ for entry in tensors],
        "tensors": [[name, str(t.dtype), list(t.shape), t.device.type, t.is_contiguous()] for name, t in tensors],
        "is_inference_mode": torch.is_inference_mode_enabled(),
        "thread": threading.current_thread().name,
        "is_main_thread": threading.current_thread() is threading.main_thread(),
        "is_process_of_caller": os.getpid() == int(os.environ["VERL_SERVER_TEST_CALLER"]),
    }
    with Path(os.environ[_HOOK_FILE]).open("a") as out:
        out.write(json.dumps(facts) + "\n")
    if tensors[0][0] == "raise":
        raise ValueError("the hook raised")
    return {"junk": object()}


class Recorder:
    def __init__(self, file: Path) -> None:
        self._file = file

    def note(self, what: str, note: str = "", **fields: Any) -> None:
        record = {"what": what, **fields, "thread": threading.current_thread().name, "note": note}
        with self._file.open("a") as out:
            out.write(json.dumps(_trimmed(record)) + "\n")

    def call(self, what: str, call: Callable[[], Any], note: str = "", **arguments: Any) -> None:
        began = time.monotonic()
        try:
            found = {"answer": call()}
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        self.note(what, note, arguments=arguments, **found, seconds=round(time.monotonic() - began, 1))


def _trimmed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _trimmed(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_trimmed(inner) for inner in value[:50]]
    if isinstance(value, str):
        return value[:_MOST]
    return value if isinstance(value, int | float | bool) else repr(value)[:_MOST]


# -- sglang.Engine in this process -------------------------------------------------------------------------------------


def record_engine(recorder: Recorder, model: str, device: str) -> None:
    from sglang.srt.entrypoints.engine import Engine  # type: ignore[import-not-found, unused-ignore]

    os.environ["VERL_SERVER_TEST_CALLER"] = str(os.getpid())
    engine = Engine(model_path=model, custom_weight_loader=[HOOK], **_settings(device))
    tensors = [("a", torch.zeros(2, 3)), ("b", torch.ones(4, dtype=torch.bfloat16))]
    tensors = [(name, tensor.to(device)) for name, tensor in tensors]

    def push(named: list[tuple[str, torch.Tensor]], load_format: str) -> Any:
        return engine.update_weights_from_tensor(named, load_format=load_format)

    recorder.call("hook: returns junk", lambda: push(tensors, HOOK), "what a hook returns is ignored")
    facts = json.loads(Path(os.environ[_HOOK_FILE]).read_text().splitlines()[-1])
    recorder.note("hook: what arrives", "the hook runs in the scheduler's process", answer=facts)

    async def stream(incremental: bool) -> list[Any]:
        frames = await engine.async_generate(input_ids=PROMPT, sampling_params=GREEDY, stream=True)
        return [[frame["output_ids"], frame["meta_info"]["finish_reason"]] async for frame in frames]

    async def streams() -> list[Any]:
        return await asyncio.wait_for(stream(False), 60)

    recorder.call(
        "engine: stream",
        lambda: engine.loop.run_until_complete(streams()),
        "frames are cumulative unless incremental_streaming_output is set",
        incremental_streaming_output=engine.server_args.incremental_streaming_output,
    )
    recorder.call("engine: result", lambda: engine.generate(input_ids=PROMPT, sampling_params=GREEDY))
    recorder.call(
        "rpc: unknown method",
        lambda: engine.collective_rpc("no_such_method", argument=1),
        "an unknown method is refused, and the scheduler goes on",
    )
    recorder.call("engine: after the rpc", lambda: engine.generate(input_ids=PROMPT, sampling_params=GREEDY))
    recorder.note("hook: raises, is sent", "if no answer follows, the scheduler and this process ended")
    recorder.call("hook: raises", lambda: push([("raise", tensors[0][1])], HOOK))


def record_load_format(recorder: Recorder, model: str, device: str) -> None:
    from sglang.srt.entrypoints.engine import Engine  # type: ignore[import-not-found, unused-ignore]

    settings = _settings(device) | {"incremental_streaming_output": True}
    engine = Engine(model_path=model, **settings)

    async def stream() -> list[Any]:
        frames = await engine.async_generate(input_ids=PROMPT, sampling_params=GREEDY, stream=True)
        return [[frame["output_ids"], frame["meta_info"]["finish_reason"]] async for frame in frames]

    recorder.call("engine: incremental stream", lambda: engine.loop.run_until_complete(asyncio.wait_for(stream(), 60)))
    recorder.note("load_format: unknown, is sent", "if no answer follows, the scheduler and this process ended")
    tensors = [("a", torch.zeros(2).to(device))]
    recorder.call("load_format: unknown", lambda: engine.update_weights_from_tensor(tensors, load_format="no_such"))


def _settings(device: str) -> dict[str, Any]:
    common = {"device": device, "skip_tokenizer_init": True, "max_running_requests": 16, "log_level": "warning"}
    if device != "cpu":
        return common | {"dtype": "bfloat16", "mem_fraction_static": 0.2}
    return common | {
        "dtype": "float32",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "max_total_tokens": 8192,
        "disable_cuda_graph": True,
    }


# -- the HTTP server ---------------------------------------------------------------------------------------------------


class Http:
    def __init__(self, url: str) -> None:
        self.url = url

    def __call__(self, path: str, body: Any = None, seconds: float = 60.0) -> Any:
        """Return {"status", "body"} of any answer. GET without a body."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                return {"status": answer.status, "body": _json(answer.read())}
        except urllib.error.HTTPError as error:
            return {"status": error.code, "body": _json(error.read())}

    def frames(self, body: Any, seconds: float = 120.0) -> Iterator[Any]:
        data = json.dumps(body | {"stream": True}).encode()
        request = urllib.request.Request(self.url + "/generate", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            for line in answer:
                if line.startswith(b"data: ") and b"[DONE]" not in line:
                    yield json.loads(line[6:])


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")


class Running:
    """A request that streams in a thread."""

    def __init__(self, http: Http, pool: ThreadPoolExecutor, rid: str, tokens: int = _LONG) -> None:
        self.frames: list[Any] = []
        self._started = threading.Event()
        params = GREEDY | {"max_new_tokens": tokens, "stream_interval": 20}
        self.ended = pool.submit(self._read, http, {"input_ids": PROMPT, "sampling_params": params, "rid": rid})
        self._started.wait(60)

    def _read(self, http: Http, body: Any) -> None:
        for frame in http.frames(body):
            self.frames.append(frame)
            self._started.set()

    def end(self) -> Any:
        """Return what is known of the end, after at most a minute."""
        self.ended.result(60)
        last = self.frames[-1]
        return {"tokens": len(last["output_ids"]), "meta_info": last["meta_info"]}


def record_http(recorder: Recorder, model: str, device: str) -> None:
    settings = [f"--{name.replace('_', '-')}" for name in ("disable_cuda_graph",) if device == "cpu"]
    for name, value in _settings(device).items():
        if name not in ("disable_cuda_graph", "skip_tokenizer_init"):
            settings += [f"--{name.replace('_', '-')}", str(value)]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model, *settings]
    log = Path(tempfile.mkdtemp()) / "log"
    with launched(command, {}, log, "/health_generate", PART_SECONDS * 2 / 3) as server, ThreadPoolExecutor(8) as pool:
        http = Http(server.url)
        _routes(recorder, http, model)
        _pages(recorder, http)
        _aborts(recorder, http, pool)
        for mode in ("in_place", "retract", "abort"):
            _pause(recorder, http, pool, mode, model)
        _faults(recorder, http, model)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(PART_SECONDS / 3)
        recorder.note("http: the server ended", answer=server.process.poll() is not None)


def _routes(recorder: Recorder, http: Http, model: str) -> None:
    info = http("/server_info")["body"]
    kept = ("version", "tp_size", "weight_version", "model_path", "max_total_num_tokens")
    state = info["internal_states"][0]
    states = [
        {name: state.get(name) for name in ("weight_version", "memory_usage", "effective_max_running_requests_per_dp")}
    ]
    answer = {name: info.get(name) for name in kept} | {"internal_states": states}
    recorder.note("http: /server_info", "identify reads internal_states, version and tp_size", answer=answer)
    recorder.call("http: /model_info", lambda: http("/model_info"))
    recorder.call("http: /version", lambda: http("/version"), "vLLM has this route")
    plain = {"input_ids": PROMPT, "sampling_params": GREEDY}
    logprobs = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    bad = GREEDY | {"temperature": -1}
    for what, path, body in (
        ("generate", "/generate", plain | logprobs | {"input_ids": PROMPT[:4]}),
        ("generate, unknown fields", "/generate", plain | {"columnar": True, "no_such_field": 1}),
        ("generate, unknown sampling parameter", "/generate", plain | {"sampling_params": {"no_such": 1}}),
        ("generate, bad temperature", "/generate", plain | {"sampling_params": bad}),
        ("generate, too long", "/generate", plain | {"input_ids": [5] * 9000}),
        ("pause wait", "/pause_generation", {"mode": "wait"}),
        ("begin_weight_update", "/begin_weight_update", {}),
        ("update from a missing folder", "/update_weights_from_disk", {"model_path": "/nowhere"}),
        ("update from disk", "/update_weights_from_disk", {"model_path": model, "weight_version": "disk"}),
        ("update without a label", "/update_weights_from_disk", {"model_path": model}),
        ("update_weight_version", "/update_weight_version", {"new_version": "named"}),
        ("get_weights_by_name", "/get_weights_by_name", {"name": "model.norm.weight", "truncate_size": 3}),
        ("weights_checker", "/weights_checker", {"action": "checksum"}),
        ("destroy an unknown group", "/destroy_weights_update_group", {"group_name": "unknown"}),
        ("flush_cache", "/flush_cache?timeout=5", {}),
        ("release_memory_occupation", "/release_memory_occupation", {}),
        ("resume_memory_occupation", "/resume_memory_occupation", {}),
        ("abort nobody", "/abort_request", {"rid": "nobody"}),
    ):
        recorder.call(f"http: {what}", lambda path=path, body=body: http(path, body), path=path, body=body)
    frames = [frame["output_ids"] for frame in http.frames(plain)]
    recorder.note("http: stream", "frames are cumulative", answer=frames)
    name = [("model.nowhere.weight", torch.zeros(3))]
    recorder.call("http: a name that the model lacks", lambda: _push(http, name), "SGLang ignores the tensor")


def _push(http: Http, tensors: list[tuple[str, torch.Tensor]], protocol: int | None = None, **fields: Any) -> Any:
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    payload = bytes(ForkingPickler.dumps(tensors, protocol))
    entries = {"serialized_named_tensors": [base64.b64encode(payload).decode()]}
    return http("/update_weights_from_tensor", entries | fields, PART_SECONDS / 2)


def _pages(recorder: Recorder, http: Http) -> None:
    for key in (None, "a", "a", "b", None, "flush", "a", None):
        if key == "flush":
            http("/flush_cache", {})
            continue
        body = {"input_ids": PROMPT, "sampling_params": GREEDY} | ({} if key is None else {"extra_key": key})
        cached = http("/generate", body)["body"]["meta_info"]["cached_tokens"]
        recorder.note("extra_key: cached tokens", arguments={"extra_key": key or "absent"}, answer=cached)


def _aborts(recorder: Recorder, http: Http, pool: ThreadPoolExecutor) -> None:
    one, longer, other = (Running(http, pool, rid) for rid in ("job-1", "job-12", "other"))
    http("/abort_request", {"rid": "job-1"})
    reasons = {
        rid: request.end()["meta_info"]["finish_reason"] for rid, request in (("job-1", one), ("job-12", longer))
    }
    answer = reasons | {"other runs on": not other.ended.done()}
    recorder.note("abort: by prefix", "an abort ends all requests whose id begins so", answer=answer)
    http("/abort_request", {"abort_all": True})
    recorder.note("abort: all", answer=other.end())


def _pause(recorder: Recorder, http: Http, pool: ThreadPoolExecutor, mode: str, model: str) -> None:
    running = Running(http, pool, f"pause-{mode}", 100)
    answer: dict[str, Any] = {"pause": http("/pause_generation", {"mode": mode})}
    http("/server_info")  # an answer of the scheduler: what it sent before the pause has arrived
    before = len(running.frames)
    held = pool.submit(http, "/generate", {"input_ids": PROMPT, "sampling_params": GREEDY})
    time.sleep(1)
    answer |= {"frames in the pause": len(running.frames) - before, "ended in the pause": running.ended.done()}
    answer |= {"new request waits": not held.done(), "flush": http("/flush_cache", {})}
    update = {"model_path": model, "flush_cache": False, "weight_version": f"in {mode}"}
    answer["update without flush"] = http("/update_weights_from_disk", update)
    answer["continue"] = http("/continue_generation", {})
    answer |= {"running": running.end(), "held": held.result(60)["body"]["meta_info"]}
    recorder.note(f"pause: {mode}", "held requests keep SGLang from emptying its cache", answer=answer)
    http("/flush_cache?timeout=10", {})


def _faults(recorder: Recorder, http: Http, model: str) -> None:
    """The last call: nothing else of the server's answers is known after it."""
    with ThreadPoolExecutor(1) as pool:
        Running(http, pool, "last")
        http("/pause_generation", {"mode": "retract"})
        recorder.call(
            "http: an update with flush_cache while a request is held",
            lambda: http("/update_weights_from_disk", {"model_path": model, "flush_cache": True}, PART_SECONDS / 2),
            "the scheduler asserts that the cache was emptied, and ends",
        )


def record_wire(recorder: Recorder, model: str, device: str) -> None:
    """Record the functions that SGLang permits in a payload. No server is needed."""
    from sglang.srt.utils import MultiprocessingSerializer  # type: ignore[import-not-found, unused-ignore]

    for protocol in (2, 3, 4):
        data = pickle.dumps(b"bytes", protocol)
        recorder.call(
            "payload: bytes",
            lambda data=data: MultiprocessingSerializer.deserialize(data),
            "protocol 2 writes bytes as a call of _codecs.encode",
            protocol=protocol,
        )


PARTS = {"wire": record_wire, "engine": record_engine, "load_format": record_load_format, "http": record_http}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", choices=tuple(PARTS))
    parser.add_argument("--model")
    options = parser.parse_args()
    if options.part:
        PARTS[options.part](Recorder(options.out), options.model, options.device)
        return
    from importlib.metadata import version

    name = f"sglang-{version('sglang')}-{options.device}.jsonl"
    out = (options.out or Path(__file__).parent / "recordings" / name).absolute()
    out.parent.mkdir(exist_ok=True)
    out.write_text("")
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model_folder(f"{scratch}/model", "qwen3", head_dim=128, max_position_embeddings=8192)
        environment = os.environ | {_HOOK_FILE: f"{scratch}/hook.jsonl", "TRITON_INTERPRET": "0"}
        environment |= {"SGLANG_USE_CPU_ENGINE": "1"} if options.device == "cpu" else {}
        for part in PARTS:
            command = [sys.executable, "-m", "tests.backends.record_sglang", "--part", part, "--model", str(model)]
            command += ["--device", options.device, "--out", str(out)]
            child = subprocess.Popen(command, env=environment, start_new_session=True)
            try:
                code: int | str = child.wait(PART_SECONDS)
            except subprocess.TimeoutExpired:
                code = f"still ran after {PART_SECONDS} s"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, 9)
            Recorder(out).note(f"part: {part}", "exit status of the process that held SGLang", answer=code)
        installed = f"{Path(torch.__file__).parents[1]}/"
        out.write_text(out.read_text().replace(str(model), "MODEL").replace(installed, ""))


if __name__ == "__main__":
    main()
