"""`HttpServerEngineAdapter.attach` to a genuine SGLang server, which this test launches by SGLang's own command.

The server computes on the CPU, or with VERL_SERVER_TEST_DEVICE=cuda on a GPU: in bfloat16, with handles of CUDA memory.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.backends.launched import GREEDY, PROMPT, Launched, begin, check, launched
from tests.waiting import eventually
from verl_server import HttpServerEngineAdapter
from verl_server.errors import BadRequestError, ServerDiedError, VerlServerError, WeightUpdateError
from verl_server.models.tiny import make_model_folder
from verl_server.weight_sync.group.broadcast import broadcast_weights, init_weights_update_group

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
    pytest.mark.timeout(420),
]

DEVICE = os.environ.get("VERL_SERVER_TEST_DEVICE", "cpu")
TOLERANCE = 1e-3 if DEVICE == "cpu" else 0.15
"""Largest difference of a log-probability from transformers in float32."""
START_SECONDS = 240
BOUND = 120.0
"""Seconds within which every call ends. A genuine server takes 65 s from a fault to its end."""
LONG = 3000
"""Tokens of a request that runs while something happens to it."""
ON_CPU = (
    "--dtype float32 --attention-backend torch_native --sampling-backend pytorch --max-total-tokens 8192 "
    "--disable-cuda-graph"
)
ON_GPU = "--dtype bfloat16 --mem-fraction-static 0.3"

Start = Callable[[], AbstractContextManager[Launched]]
Weights = list[tuple[str, torch.Tensor]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints, with a head size that the attention kernels of GPUs have."""
    shape = {"head_dim": 128, "max_position_embeddings": 8192}
    return [make_model_folder(tmp_path_factory.mktemp("model"), "qwen3", seed=seed, **shape) for seed in (0, 9)]


@pytest.fixture(scope="module")
def start(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Start:
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folders[0]), "--device", DEVICE]
    command += ["--max-running-requests", "16", *(ON_CPU if DEVICE == "cpu" else ON_GPU).split()]
    environment = {"SGLANG_USE_CPU_ENGINE": "1"} if DEVICE == "cpu" else {}
    environment |= {"TRITON_INTERPRET": "0"}  # SGLang's kernels are no business of this package's interpreter
    return lambda: launched(
        command, environment, tmp_path_factory.mktemp("sglang") / "log", "/health_generate", START_SECONDS
    )


@pytest.fixture(scope="module")
def sglang(start: Start) -> Iterator[HttpServerEngineAdapter]:
    """An adapter that is attached to an SGLang server, which serves the first checkpoint at the start."""
    with start() as server, HttpServerEngineAdapter.attach(server.url) as adapter:
        yield adapter


@pytest.fixture
def fresh(sglang: HttpServerEngineAdapter, folders: list[Path]) -> Iterator[HttpServerEngineAdapter]:
    """The shared adapter. The server has the first checkpoint as "first", an empty cache, no requests and no pause."""
    sglang.abort_request(abort_all=True)
    sglang.continue_generation()
    sglang.update_weights_from_disk(str(folders[0]), weight_version="first", mode="abort")
    yield sglang
    sglang.abort_request(abort_all=True)
    sglang.continue_generation()


@pytest.fixture(scope="module")
def models(folders: list[Path]) -> list[Any]:
    auto: Any = AutoModelForCausalLM
    return [auto.from_pretrained(folder, dtype=torch.float32).eval() for folder in folders]


@pytest.fixture(scope="module")
def weights(folders: list[Path]) -> list[Weights]:
    """The tensors of each checkpoint on the device."""
    return [[(n, t.to(DEVICE)) for n, t in load_file(folder / "model.safetensors").items()] for folder in folders]


@pytest.fixture(autouse=True)
def shared_files() -> Iterator[None]:
    """CPU tensors reach a process of another project through files only."""
    before = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    yield
    torch.multiprocessing.set_sharing_strategy(before)  # type: ignore[no-untyped-call]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def serves(adapter: HttpServerEngineAdapter, model: Any, label: str | None = None) -> None:
    """Assert that the server answers with the weights of `model`, and with this label."""
    result: Any = adapter.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True, timeout=BOUND)
    check(model, PROMPT, result, TOLERANCE)
    assert label is None or result["meta_info"]["weight_version"] == label


# -- information and generation ----------------------------------------------------------------------------------------


def test_the_server_is_recognized(fresh: HttpServerEngineAdapter, folders: list[Path]) -> None:
    info: Any = fresh.get_server_info()
    assert fresh._attached is not None and fresh._attached.name == f"SGLang {info['version']}"
    assert info["tp_size"] == 1 and info["weight_version"] == "first"
    assert fresh.get_model_info()["weight_version"] == "first"
    assert fresh.get_model_info()["model_path"] == str(folders[0])


def test_tokens_and_logprobs_are_those_of_transformers(fresh: HttpServerEngineAdapter, models: list[Any]) -> None:
    result: Any = fresh.generate(
        input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True, logprob_start_len=0, top_logprobs_num=2
    )
    check(models[0], PROMPT, result, TOLERANCE)
    meta = result["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    with torch.inference_mode():
        rows = models[0](torch.tensor([PROMPT])).logits[0].float().log_softmax(-1)
    assert [token for _, token, _ in meta["input_token_logprobs"]] == PROMPT
    assert meta["input_token_logprobs"][0][0] is None
    for row, (value, token, _) in zip(rows, meta["input_token_logprobs"][1:], strict=False):
        assert abs(value - float(row[token])) < TOLERANCE
    for (value, token, _), best in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert len(best) == 2
        assert [*best[0][:2]] == [value, token] and best[1][0] <= value
    assert len(meta["input_top_logprobs"]) == len(PROMPT)


def test_batches_samples_and_text(fresh: HttpServerEngineAdapter, models: list[Any]) -> None:
    prompts = [PROMPT, PROMPT[:20]]
    results: Any = fresh.generate(input_ids=prompts, sampling_params=[GREEDY, GREEDY], return_logprob=True)
    for prompt, result in zip(prompts, results, strict=True):
        check(models[0], prompt, result, TOLERANCE)
    drawn: Any = fresh.generate("Hello", {"n": 3, "temperature": 1.0, "max_new_tokens": 4})
    assert len(drawn) == 3 and all(0 < len(result["output_ids"]) <= 4 for result in drawn)
    assert all(isinstance(result["text"], str) for result in drawn)
    again: Any = asyncio.run(fresh.async_generate("Hello", GREEDY, return_logprob=True))
    assert again["output_ids"] == fresh.generate("Hello", GREEDY)["output_ids"]


def test_a_stream_holds_everything_so_far(fresh: HttpServerEngineAdapter, models: list[Any]) -> None:
    frames: list[Any] = list(fresh.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True, stream=True))
    assert all(b["output_ids"][: len(a["output_ids"])] == a["output_ids"] for a, b in itertools.pairwise(frames))
    check(models[0], PROMPT, frames[-1], TOLERANCE)
    assert frames[-1]["meta_info"]["finish_reason"]["type"] == "length"


def test_stop_tokens(fresh: HttpServerEngineAdapter) -> None:
    ids: Any = fresh.generate(input_ids=PROMPT, sampling_params=GREEDY)["output_ids"]
    params = GREEDY | {"stop_token_ids": [ids[3]], "ignore_eos": False}
    result = fresh.generate(input_ids=PROMPT, sampling_params=params)
    assert result["output_ids"] == ids[: ids.index(ids[3]) + 1]
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[3]}


def test_an_abort_ends_all_requests_whose_id_begins_so(
    fresh: HttpServerEngineAdapter, pool: ThreadPoolExecutor
) -> None:
    one, longer, other = (begin(fresh, pool, rid, LONG) for rid in ("job-1", "job-12", "other"))
    fresh.abort_request("job-1")
    for request in (one, longer):
        frame = request.result(BOUND)
        assert frame["meta_info"]["finish_reason"]["type"] == "abort" and 0 < len(frame["output_ids"]) < LONG
    assert not other.done()
    fresh.abort_request("nobody")
    fresh.abort_request()
    fresh.abort_request(abort_all=True)
    assert other.result(BOUND)["meta_info"]["finish_reason"]["type"] == "abort"


def test_pages_have_a_namespace_and_are_flushed(fresh: HttpServerEngineAdapter) -> None:
    def cached(**options: Any) -> Any:
        return fresh.generate(input_ids=PROMPT, sampling_params=GREEDY, **options)["meta_info"]["cached_tokens"]

    assert [cached(), cached(), cached(extra_key="a"), cached(extra_key="a"), cached(extra_key="b")] == [
        0,
        39,
        0,
        39,
        0,
    ]
    assert fresh.flush_cache()
    assert [cached(), cached(extra_key="a")] == [0, 0]


# -- pauses ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_a_pause_holds_requests(fresh: HttpServerEngineAdapter, pool: ThreadPoolExecutor, mode: Any) -> None:
    running = begin(fresh, pool, "running", 100)
    fresh.pause_generation(mode)
    held: Future[Any] = pool.submit(fresh.generate, input_ids=PROMPT, sampling_params=GREEDY, timeout=BOUND)
    assert not eventually(held.done, 1)
    assert running.done() is (mode == "abort")
    assert fresh.flush_cache() is (mode == "abort"), "SGLang keeps the cache while it holds requests"
    fresh.continue_generation()
    assert len(held.result(BOUND)["output_ids"]) == 8
    frame = running.result(BOUND)
    assert frame["meta_info"]["finish_reason"]["type"] == ("abort" if mode == "abort" else "length")
    assert frame["meta_info"]["num_retractions"] == (1 if mode == "retract" else 0)


def test_there_is_no_pause_that_waits(fresh: HttpServerEngineAdapter) -> None:
    with pytest.raises(BadRequestError, match='no pause "wait"'):
        fresh.pause_generation("wait")


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["wait", "in_place", "retract", "abort"])
def test_tensors_are_pushed_to_an_idle_server(
    fresh: HttpServerEngineAdapter, models: list[Any], weights: list[Weights], mode: Any
) -> None:
    for checkpoint in (1, 0, 1):
        serves(fresh, models[1 - checkpoint])
        fresh.update_weights_from_tensor(weights[checkpoint], weight_version=f"{mode}{checkpoint}", mode=mode)
        serves(fresh, models[checkpoint], f"{mode}{checkpoint}")


@pytest.mark.parametrize("mode", ["wait", "in_place", "abort"])
def test_tensors_are_pushed_while_a_request_runs(
    fresh: HttpServerEngineAdapter, models: list[Any], weights: list[Weights], pool: ThreadPoolExecutor, mode: Any
) -> None:
    running = begin(fresh, pool, "running", 100 if mode == "wait" else 200)
    fresh.update_weights_from_tensor(weights[1], weight_version="pushed", mode=mode)
    assert not running.done() or mode != "in_place"
    frame = running.result(BOUND)
    assert frame["meta_info"]["finish_reason"]["type"] == ("abort" if mode == "abort" else "length")
    assert frame["meta_info"]["weight_version"] == ("pushed" if mode == "in_place" else "first")
    fresh.flush_cache()
    serves(fresh, models[1], "pushed")


@pytest.mark.parametrize("paused_by_caller", [False, True])
def test_requests_that_are_held_do_not_read_old_pages_unasked(
    fresh: HttpServerEngineAdapter,
    models: list[Any],
    weights: list[Weights],
    pool: ThreadPoolExecutor,
    paused_by_caller: bool,
) -> None:
    running = begin(fresh, pool, "running", 100)
    if paused_by_caller:
        fresh.pause_generation("retract")
    with pytest.raises(WeightUpdateError, match="cannot empty its prefix cache"):
        fresh.update_weights_from_tensor(weights[1], mode="retract")
    fresh.update_weights_from_tensor(weights[1], mode="retract", weight_version="asked", flush_cache=False)
    fresh.continue_generation()
    meta = running.result(BOUND)["meta_info"]
    assert meta["finish_reason"]["type"] == "length" and meta["weight_version"] == "asked"
    assert meta["num_retractions"] >= 1
    assert fresh.flush_cache(10.0)
    serves(fresh, models[1], "asked")


def test_buckets_and_versions(fresh: HttpServerEngineAdapter, models: list[Any], weights: list[Weights]) -> None:
    half = len(weights[1]) // 2
    fresh.update_weights_from_tensor(weights[1][:half], weight_version="half", partial=True)
    fresh.update_weights_from_tensor(weights[1][half:], weight_version="whole", partial=True)
    serves(fresh, models[1], "whole")
    fresh.update_weights_from_tensor(weights[0])
    label = fresh.get_model_info()["weight_version"]
    assert label not in ("whole", "first")
    serves(fresh, models[0], label)
    fresh.update_weight_version("named")
    serves(fresh, models[0], "named")


def test_a_name_that_the_model_lacks_is_ignored_by_sglang(fresh: HttpServerEngineAdapter, models: list[Any]) -> None:
    nowhere = torch.zeros(3, device=DEVICE)
    fresh.update_weights_from_tensor([("model.nowhere.weight", nowhere)], weight_version="ignored", partial=True)
    serves(fresh, models[0], "ignored")


@pytest.mark.parametrize("mode", ["wait", "in_place", "retract", "abort"])
def test_weights_from_disk(fresh: HttpServerEngineAdapter, models: list[Any], folders: list[Path], mode: Any) -> None:
    for checkpoint in (1, 0):
        fresh.update_weights_from_disk(str(folders[checkpoint]), mode=mode, weight_version=f"{mode}{checkpoint}")
        serves(fresh, models[checkpoint], f"{mode}{checkpoint}")


def test_generation_stays_paused_after_a_folder_that_is_missing(
    fresh: HttpServerEngineAdapter, models: list[Any]
) -> None:
    """SGLang does not say if an update failed before the first write."""
    with pytest.raises(VerlServerError, match=r"nowhere.*stays paused"):
        fresh.update_weights_from_disk("/nowhere")
    fresh.continue_generation()
    serves(fresh, models[0], "first")


@pytest.mark.skipif(DEVICE == "cuda" and torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank")
def test_weights_from_a_process_group(
    fresh: HttpServerEngineAdapter, models: list[Any], weights: list[Weights]
) -> None:
    backend = "gloo" if DEVICE == "cpu" else "nccl"
    with init_weights_update_group([fresh], "127.0.0.1", backend=backend, device=DEVICE, timeout=BOUND) as group:
        for checkpoint in (1, 0):
            broadcast_weights(group, weights[checkpoint])
            serves(fresh, models[checkpoint])
    with pytest.raises(VerlServerError, match="does not exist"):
        fresh.destroy_weights_update_group("unknown")


@pytest.mark.parametrize(
    "order", [("generate", "push", "generate", "push", "generate"), ("push", "push", "generate"), ("push", "pause")]
)
def test_generation_and_pushes_alternate(
    fresh: HttpServerEngineAdapter, models: list[Any], weights: list[Weights], order: tuple[str, ...]
) -> None:
    """Over HTTP, servers of other projects have hung at the call after an update. Each call here has a bound."""
    served = 0
    for _ in range(2):
        for step in order:
            if step == "generate":
                serves(fresh, models[served])
            elif step == "pause":
                fresh.pause_generation("abort")
                fresh.update_weights_from_tensor(weights[served])
                fresh.continue_generation()
            else:
                served = 1 - served
                fresh.update_weights_from_tensor(weights[served])
    serves(fresh, models[served])


def test_sleep_and_wake(fresh: HttpServerEngineAdapter, models: list[Any]) -> None:
    """Without --enable-memory-saver SGLang answers and releases nothing."""
    fresh.release_memory_occupation()
    fresh.resume_memory_occupation()
    serves(fresh, models[0])


# -- faults ------------------------------------------------------------------------------------------------------------


def test_bad_input_gets_sglangs_error(fresh: HttpServerEngineAdapter, models: list[Any]) -> None:
    for params, message in (
        ({"temperature": -1}, "temperature must be"),
        ({"no_such_parameter": 0}, "Internal Server Error"),  # SGLang's own answer, after which it disconnects
        ({"max_new_tokens": -1}, "max_new_tokens must be"),
    ):
        with pytest.raises(VerlServerError, match=message):
            fresh.generate(input_ids=PROMPT, sampling_params=params)
    with pytest.raises(BadRequestError, match="longer than the model's context length"):
        list(fresh.generate(input_ids=[5] * 9000, sampling_params=GREEDY, stream=True))
    with pytest.raises(BadRequestError, match="cannot be empty"):
        fresh.generate(input_ids=[], sampling_params=GREEDY)
    serves(fresh, models[0])


def test_what_the_wire_lacks_is_refused_by_name(fresh: HttpServerEngineAdapter, models: list[Any]) -> None:
    with pytest.raises(BadRequestError, match="keeps no registered weights"):
        fresh.register_weights(models[0])
    with pytest.raises(BadRequestError, match="no transactions"):
        fresh.update_weights_from_disk("/nowhere", transaction_id="t")
    with pytest.raises(BadRequestError, match="cannot honor partial=False"):
        fresh.update_weights_from_tensor([("a", torch.zeros(2))], partial=False)


def test_a_killed_server_ends_its_calls(start: Start, pool: ThreadPoolExecutor) -> None:
    with start() as server, HttpServerEngineAdapter.attach(server.url) as adapter:
        running = begin(adapter, pool, "running", LONG)
        waiting = pool.submit(adapter.update_weights_from_disk, adapter.server_args.model_path)
        server.kill()
        for call in (running, waiting):
            with pytest.raises(ServerDiedError):
                call.result(30)


def test_a_wrong_shape_ends_the_server_and_the_call(start: Start) -> None:
    """SGLang 0.5.16 asserts that shapes are equal, in its scheduler."""
    with start() as server, HttpServerEngineAdapter.attach(server.url) as adapter:
        with pytest.raises(ServerDiedError):
            adapter.update_weights_from_tensor([("model.norm.weight", torch.zeros(3, device=DEVICE))])
        assert server.process.wait(BOUND) != 0
