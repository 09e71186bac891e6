"""`Engine` and `HttpServerEngineAdapter` have one interface and return the same results and errors."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from tests.waiting import eventually
from verl_server import (
    BadRequestError,
    ControlTimeoutError,
    Engine,
    EngineBase,
    HttpServerEngineAdapter,
    ServerArgs,
    ServerDiedError,
    ServerLaunchError,
    ServerUnavailableError,
    WeightUpdateError,
)
from verl_server.ipc.readiness import wait_readable
from verl_server.messages.results import GenerateResult, InternalState, MetaInfo, ModelInfo, SchedulerInfo, ServerInfo

GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
SMALL = {"kv_cache_gib": 0.05, "cpu_threads": 1, "port": 0}


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[Engine]:
    with Engine(model_path=str(tiny_llama), **SMALL) as engine:
        yield engine


@pytest.fixture(scope="module")
def adapter(tiny_llama: Path) -> Iterator[HttpServerEngineAdapter]:
    with HttpServerEngineAdapter(model_path=str(tiny_llama), **SMALL) as adapter:
        yield adapter


@pytest.fixture(params=["engine", "adapter", "attached"])
def face(request: pytest.FixtureRequest) -> Iterator[EngineBase]:
    """Yield an engine for each of the three ways to hold one."""
    if request.param == "attached":
        launched = request.getfixturevalue("adapter")
        with HttpServerEngineAdapter.attach(launched.url, admin_api_key=launched.admin_api_key) as attached:
            yield attached
    else:
        yield request.getfixturevalue(request.param)


# -- generation ---------------------------------------------------------------------------------------------


def test_both_engines_give_the_same_result(engine: Engine, adapter: HttpServerEngineAdapter) -> None:
    options: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    mine, theirs = (e.generate("hello", GREEDY, **options) for e in (engine, adapter))
    assert (mine["text"], mine["output_ids"]) == (theirs["text"], theirs["output_ids"])
    for name in ("output_token_logprobs", "input_token_logprobs", "output_top_logprobs", "finish_reason"):
        assert mine["meta_info"][name] == theirs["meta_info"][name]
    assert len(mine["output_ids"]) == len(mine["meta_info"]["output_token_logprobs"]) == 8


def test_shapes(face: EngineBase) -> None:
    one = face.generate(input_ids=[5, 6], sampling_params=GREEDY)
    assert set(one) == {"text", "output_ids", "meta_info"}
    many = face.generate(input_ids=[[5, 6], [7]], sampling_params=GREEDY | {"n": 2})
    assert [m["meta_info"]["prompt_tokens"] for m in many] == [2, 2, 1, 1]
    assert many[0]["output_ids"] == one["output_ids"]
    tensor = face.generate(input_ids=torch.tensor([5, 6]), sampling_params=GREEDY)  # type: ignore[arg-type]
    assert tensor["output_ids"] == one["output_ids"]
    assert face.generate("hi")["meta_info"]["completion_tokens"] <= 128


def test_stream(face: EngineBase) -> None:
    frames = list(face.generate("hi", GREEDY, stream=True))
    assert frames[-1]["output_ids"] == face.generate("hi", GREEDY)["output_ids"]
    assert frames[-1]["meta_info"]["finish_reason"]["type"] == "length"
    frames = face.generate(input_ids=[5], sampling_params=GREEDY | {"max_new_tokens": 400}, stream=True)
    next(frames)
    frames.close()
    assert _becomes_idle(face)


def test_async_generate_from_several_loops(face: EngineBase) -> None:
    async def gather() -> list[Any]:
        return await asyncio.gather(*(face.async_generate(input_ids=[i], sampling_params=GREEDY) for i in range(8)))

    async def stream() -> list[Any]:
        return [f async for f in await face.async_generate(input_ids=[3], sampling_params=GREEDY, stream=True)]

    expected = [face.generate(input_ids=[i], sampling_params=GREEDY)["output_ids"] for i in range(8)]
    with ThreadPoolExecutor(2) as pool:
        for results in pool.map(lambda _: asyncio.run(gather()), range(2)):
            assert [r["output_ids"] for r in results] == expected
    assert asyncio.run(stream())[-1]["output_ids"] == expected[3]


def test_many_threads_at_once(face: EngineBase) -> None:
    with ThreadPoolExecutor(32) as pool:
        jobs = [pool.submit(face.generate, None, GREEDY, [i]) for i in range(64)]
        assert [len(job.result(30)["output_ids"]) for job in jobs] == [8] * 64


def test_abort_and_pause(face: EngineBase) -> None:
    face.pause_generation("in_place")
    try:
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(face.generate, None, GREEDY | {"max_new_tokens": 400}, [5], rid="long")
            assert eventually(lambda: face.get_server_info()["internal_states"][0]["num_waiting_reqs"])
            face.abort_request("long")
            assert job.result(10)["meta_info"]["finish_reason"]["type"] == "abort"
    finally:
        face.continue_generation()
    assert face.generate(input_ids=[5], sampling_params=GREEDY)["meta_info"]["completion_tokens"] == 8


def test_timeout_ends_the_request(face: EngineBase) -> None:
    face.pause_generation("in_place")
    try:
        with pytest.raises(ControlTimeoutError):
            face.generate(input_ids=[5], sampling_params=GREEDY, timeout=0.3)
    finally:
        face.continue_generation()
    assert _becomes_idle(face)


# -- weights, memory, info ----------------------------------------------------------------------------------


def test_weights_memory_and_cache(face: EngineBase, tiny_llama: Path) -> None:
    norm = torch.tensor(face.get_weights_by_name("model.norm.weight"))
    version = face.get_model_info()["weight_version"]
    before = face.generate("hi", GREEDY)
    changed = [("model.norm.weight", norm + 1)]
    with pytest.raises(WeightUpdateError, match=r"missing: 'model\.embed_tokens\.weight', .* partial=True"):
        face.update_weights_from_tensor(changed, weight_version="pushed")
    assert face.get_model_info()["weight_version"] == version
    assert face.generate("hi", GREEDY)["output_ids"] == before["output_ids"]
    done, message = face.update_weights_from_tensor(changed, weight_version="pushed", partial=True)
    assert done and "Not covered: " in message and "model.embed_tokens.weight" in message
    assert torch.allclose(torch.tensor(face.get_weights_by_name("model.norm.weight")), norm + 1)
    after = face.generate("hi", GREEDY)
    assert after["meta_info"]["weight_version"] == face.get_model_info()["weight_version"] == "pushed" != version
    with pytest.raises(WeightUpdateError, match="no_such"):
        face.update_weights_from_tensor([("no_such", norm)])
    with pytest.raises(BadRequestError, match="no_such"):
        face.get_weights_by_name("no_such")
    assert face.flush_cache(timeout=5)
    face.release_memory_occupation(["kv_cache", "weights"])
    with pytest.raises(ServerUnavailableError):
        face.generate("hi", GREEDY)
    face.resume_memory_occupation(["kv_cache", "weights"])
    assert face.update_weights_from_disk(str(tiny_llama))[0]
    assert face.generate("hi", GREEDY)["output_ids"] == before["output_ids"]
    assert face.weights_checker()


def test_results_have_the_keys_that_their_types_declare(face: EngineBase) -> None:
    result = face.generate(
        "hello",
        GREEDY,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=1,
        token_ids_logprob=[5],
        return_prompt_token_ids=True,
        return_sampling_mask=True,
    )
    expect_declared(result, GenerateResult)
    expect_declared(result["meta_info"], MetaInfo)
    edited = {"output_token_policy_logprobs", "output_token_has_choice"}  # of tokens with a mask, penalty or bias
    assert set(result["meta_info"]) == set(MetaInfo.__annotations__) - edited
    for frame in face.generate(["a", "b"], GREEDY, stream=True):
        expect_declared(frame, GenerateResult)
        expect_declared(frame["meta_info"], MetaInfo)
    info = face.get_server_info()
    assert set(info) >= set(ServerInfo.__annotations__) | set(SchedulerInfo.__annotations__)
    assert set(face.scheduler_info) == set(SchedulerInfo.__annotations__)
    assert set(info["internal_states"][0]) == set(face.get_internal_state()) == set(InternalState.__annotations__)
    assert set(face.get_model_info()) == set(ModelInfo.__annotations__)


def test_servers_without_a_seed_draw_different_ones(engine: Engine, adapter: HttpServerEngineAdapter) -> None:
    """Replicas that drew the same samples would make every GRPO group collapse, and nothing would show the reason."""
    ours, theirs = (each.get_server_info()["random_seed"] for each in (engine, adapter))
    assert ours != theirs
    assert (engine.server_args.random_seed, adapter.server_args.random_seed) == (ours, theirs)


def expect_declared(value: Any, kind: Any) -> None:
    assert kind.__required_keys__ <= set(value) <= set(kind.__annotations__)


def test_info(face: EngineBase, tiny_llama: Path) -> None:
    info = face.get_server_info()
    assert info["model_path"] == face.server_args.model_path == str(tiny_llama)
    assert face.scheduler_info["vocab_size"] == info["vocab_size"] == 320
    assert face.get_model_info()["model_type"] == "llama"


@pytest.mark.parametrize(
    "named_tensors", [{"model.norm.weight": torch.ones(64)}, [torch.ones(64)], [(3, torch.ones(64))]]
)
def test_a_push_that_is_no_pairs_says_what_to_pass(face: EngineBase, named_tensors: Any) -> None:
    with pytest.raises(BadRequestError, match=r"\(name, tensor\) pairs"):
        face.update_weights_from_tensor(named_tensors)


@pytest.mark.parametrize(
    "arguments",
    [
        {"prompt": None},
        {"prompt": "a", "sampling_params": {"bogus": 1}},
        {"prompt": "a", "sampling_params": {"temperature": float("nan")}},
        {"prompt": "a", "sampling_params": {"top_p": 2.0}},
        {"input_ids": [999]},
        {"input_ids": [5] * 600},
        {"prompt": "a", "lora_path": "x"},
    ],
)
def test_same_error_in_process_and_over_http(
    engine: Engine, adapter: HttpServerEngineAdapter, arguments: dict[str, Any]
) -> None:
    messages = []
    for face in (engine, adapter):
        with pytest.raises(BadRequestError) as caught:
            face.generate(**arguments)
        messages.append(str(caught.value).removeprefix("sampling_params: "))
    assert messages[0] == messages[1]


def test_openai_client(adapter: HttpServerEngineAdapter, tiny_llama: Path) -> None:
    with openai.OpenAI(base_url=f"{adapter.url}/v1", api_key="unused", max_retries=0) as client:
        assert client.models.list().data[0].id == str(tiny_llama)
        chat = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=4, logprobs=True, top_logprobs=2
        )
        assert chat.usage is not None and chat.usage.completion_tokens <= 4
        assert chat.choices[0].logprobs is not None
        whole = client.completions.create(model="m", prompt="hi", max_tokens=6, temperature=0)
        stream = client.completions.create(model="m", prompt="hi", max_tokens=6, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.completions.create(model="m", prompt="hi", max_tokens=0)


# -- shutdown and death -------------------------------------------------------------------------------------


def test_own_loop_is_refused(engine: Engine) -> None:
    async def from_the_loop() -> None:
        engine.generate("hi", GREEDY)

    with pytest.raises(RuntimeError, match="own event loop"):
        engine.tokenizer_manager.run_sync(from_the_loop(), timeout=10)


def test_shutdown_leaves_no_process_and_refuses_calls(tiny_llama: Path) -> None:
    engine = Engine(model_path=str(tiny_llama), **SMALL)
    pids = [child.pid for child in engine._processes.children]
    engine.shutdown()
    engine.shutdown()
    assert not any(_exists(pid) for pid in pids)
    with pytest.raises(ServerUnavailableError):
        engine.generate("hi")


def test_killed_scheduler_fails_calls_in_flight(tiny_llama: Path) -> None:
    with Engine(model_path=str(tiny_llama), **SMALL) as engine:
        engine.pause_generation("in_place")
        with ThreadPoolExecutor(2) as pool:
            jobs = [pool.submit(engine.generate, "hi") for _ in range(2)]
            assert eventually(lambda: engine.tokenizer_manager.num_requests == 2)
            began = time.monotonic()
            os.kill(engine._processes.children[0].pid, signal.SIGKILL)
            for job in jobs:
                with pytest.raises(ServerDiedError, match="scheduler-tp0 ended with signal SIGKILL"):
                    job.result(10)
        assert time.monotonic() - began < 5
        with pytest.raises(ServerDiedError):
            engine.flush_cache()


@pytest.mark.parametrize("victim", ["server", "scheduler"])
def test_killed_server_fails_calls_in_flight(tiny_llama: Path, victim: str) -> None:
    with HttpServerEngineAdapter(model_path=str(tiny_llama), **SMALL) as adapter:
        scheduler = adapter.scheduler_info["pid"]
        scheduler_end = os.pidfd_open(scheduler)
        adapter.pause_generation("in_place")
        with ThreadPoolExecutor(3) as pool:
            jobs = [pool.submit(adapter.generate, "hi") for _ in range(2)]
            jobs.append(pool.submit(lambda: asyncio.run(adapter.async_generate("hi"))))
            assert eventually(lambda: adapter.get_server_info()["internal_states"][0]["num_waiting_reqs"] == 3)
            began = time.monotonic()
            os.kill(adapter.pid if victim == "server" else scheduler, signal.SIGKILL)  # type: ignore[arg-type]
            for job in jobs:
                with pytest.raises(ServerDiedError, match=r"SIGKILL|ended with"):
                    job.result(10)
        assert time.monotonic() - began < 10
        assert wait_readable(scheduler_end, 10), "the scheduler outlived its server"
        os.close(scheduler_end)
        with pytest.raises(ServerDiedError):
            adapter.generate("hi")


def test_launch_failures_carry_the_cause(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ServerLaunchError, match="does not exist"):
        Engine(model_path=str(tmp_path / "absent"))
    with pytest.raises(ServerLaunchError, match="does not exist"):
        HttpServerEngineAdapter(model_path=str(tmp_path / "absent"), port=0)
    with pytest.raises(BadRequestError, match="Unknown server argument"):
        Engine(model_path=str(tiny_llama), no_such_setting=1)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ServerLaunchError, match=r"Traceback|tokenizer"):
        HttpServerEngineAdapter(model_path=str(tmp_path), port=0)


def test_attach_to_nothing_is_an_error() -> None:
    with pytest.raises(ServerDiedError, match="connection"):
        HttpServerEngineAdapter.attach("http://127.0.0.1:9")


def test_keys_travel(tiny_llama: Path) -> None:
    args = ServerArgs(model_path=str(tiny_llama), api_key="k", admin_api_key="a", skip_tokenizer_init=True, **SMALL)
    with HttpServerEngineAdapter(server_args=args) as adapter:
        assert "text" not in adapter.generate(input_ids=[5], sampling_params=GREEDY)
        adapter.flush_cache()
        plain = HttpServerEngineAdapter.attach(adapter.url or "", api_key="k")
        assert plain.generate(input_ids=[5], sampling_params=GREEDY)
        plain.abort_request("nobody's")
        for call in (plain.pause_generation, lambda: plain.abort_request(abort_all=True)):
            with pytest.raises(BadRequestError, match="admin_api_key"):
                call()
        with pytest.raises(BadRequestError, match="api_key"):
            HttpServerEngineAdapter.attach(adapter.url or "")
        admin = HttpServerEngineAdapter.attach(adapter.url or "", admin_api_key="a")
        assert admin.generate(input_ids=[5], sampling_params=GREEDY) and admin.flush_cache()
        assert httpx.get(f"{adapter.url}/health").status_code == 200


def test_a_launched_server_obeys_nobody_else(adapter: HttpServerEngineAdapter) -> None:
    """The admin key is random and cannot be read elsewhere. Every process on the host may generate."""
    key = adapter.admin_api_key
    assert key is not None and len(key) > 20 and adapter.server_args.admin_api_key == key
    stranger = HttpServerEngineAdapter.attach(str(adapter.url))
    assert stranger.generate(input_ids=[5], sampling_params=GREEDY)
    with pytest.raises(BadRequestError, match="admin_api_key"):
        stranger.flush_cache()
    with HttpServerEngineAdapter.attach(str(adapter.url), admin_api_key=key) as told:
        assert told.flush_cache()
    pids = [adapter.pid, adapter.scheduler_info["pid"]]
    for file in (Path(f"/proc/{pid}/{name}") for pid in pids for name in ("cmdline", "environ")):
        assert key.encode() not in file.read_bytes(), file
    assert key not in repr(adapter.server_args) and key not in httpx.get(f"{adapter.url}/server_info").text
    assert adapter._child is not None and key not in adapter._child.log_tail()


def _exists(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the process may end between open and read
        return False


def _becomes_idle(face: EngineBase) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        state = face.get_server_info()["internal_states"][0]
        if state["num_running_reqs"] + state["num_waiting_reqs"] == 0:
            return True
        threading.Event().wait(0.02)
    return False


def test_unset_max_new_tokens_fits_a_cache_smaller_than_the_context(tiny_llama: Path) -> None:
    with Engine(model_path=str(tiny_llama), device="cpu", max_total_tokens=64, page_size=8) as engine:
        sampling = {"max_new_tokens": None, "ignore_eos": True}
        result = engine.generate(input_ids=[5] * 20, sampling_params=sampling, timeout=60)
        assert result["meta_info"]["completion_tokens"] == 64 + 1 - 20
