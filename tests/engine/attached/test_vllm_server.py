"""An attached vLLM server gets the right calls: pauses, updates, handles. `tests/backends` has a genuine server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from tests.engine.attached.conftest import Start
from tests.engine.attached.fake_server import FakeServer
from verl_server import HttpServerEngineAdapter
from verl_server.engine.attached import pickled_tensors
from verl_server.errors import BadRequestError, WeightUpdateError
from verl_server.weight_sync.handles import PickledHandles
from verl_server.weight_sync.vllm.ipc_handles import parse_ipc_handles

ROUTES = (
    *("/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/abort_requests", "/sleep", "/wake_up"),
    *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
)
COMPLETION = {
    "choices": [{"index": 0, "text": "ab", "token_ids": [1, 2], "finish_reason": "length", "prompt_token_ids": [5]}],
    "usage": {"prompt_tokens": 1},
}


class FakeCuda(torch.Tensor):
    is_cuda = True  # type: ignore[assignment]


@pytest.fixture
def server(start: Start) -> FakeServer:
    answers: dict[str, Any] = {path: (200, {}) for path in ROUTES}
    answers["/version"] = (200, {"version": "0.26.0"})
    answers["/v1/models"] = (200, {"data": [{"id": "m", "max_model_len": 64}]})
    answers["/v1/completions"] = (200, COMPLETION)
    return start(answers)


@pytest.fixture
def adapter(server: FakeServer) -> Iterator[HttpServerEngineAdapter]:
    with HttpServerEngineAdapter.attach(server.url) as adapter:
        yield adapter


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make handles of `FakeCuda` tensors without a GPU."""

    def reduce_tensor(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        size, stride = tensor.size(), tensor.stride()
        storage = (torch.UntypedStorage, tensor.dtype, 0, b"handle" * 10 + b"1234", 4 * tensor.numel(), 0)
        counters = (False, b"/torch_1_2_3", 0, b"event" * 12 + b"1234", False)
        return reductions.rebuild_cuda_tensor, (torch.Tensor, size, stride, 0, *storage, *counters)

    monkeypatch.setattr(reductions, "reduce_tensor", reduce_tensor)
    monkeypatch.setattr(pickled_tensors, "gpu_uuid", lambda device: "0000-01")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.parametrize(
    ("mode", "calls"),
    [
        ("wait", ["/pause?mode=wait"]),
        ("abort", ["/pause?mode=abort"]),
        ("in_place", ["/pause?mode=keep"]),
        ("retract", ["/pause?mode=keep", "/reset_prefix_cache?reset_running_requests=true"]),
    ],
)
def test_an_update_is_written_in_a_pause(
    adapter: HttpServerEngineAdapter, server: FakeServer, mode: Any, calls: list[str]
) -> None:
    adapter.update_weights_from_disk("/folder", mode=mode)
    assert server.called == [*calls, "/collective_rpc", "/resume"]
    assert server.posted[-2][1]["kwargs"] == {"weights_path": "/folder"}
    assert adapter.generate("x")["meta_info"]["weight_version"].startswith("2@")


def test_a_cache_that_is_in_use_is_said(adapter: HttpServerEngineAdapter, server: FakeServer) -> None:
    assert adapter.flush_cache()
    server.answers["/reset_prefix_cache"] = (200, {"success": False})
    assert not adapter.flush_cache()
    with pytest.raises(WeightUpdateError, match="KV cache"):
        adapter.pause_generation("retract")


def test_a_pause_of_the_caller_outlasts_updates(adapter: HttpServerEngineAdapter, server: FakeServer) -> None:
    adapter.pause_generation("in_place")
    adapter.update_weights_from_disk("/folder")
    assert server.called == ["/pause?mode=keep", "/collective_rpc"]
    adapter.continue_generation()
    assert server.called[-1] == "/resume"


def test_a_failed_update_serves_nothing_until_one_succeeds(
    adapter: HttpServerEngineAdapter, server: FakeServer
) -> None:
    server.answers["/collective_rpc"] = (500, {"error": {"message": "no such folder"}})
    with pytest.raises(WeightUpdateError, match=r"no such folder.*stays paused"):
        adapter.update_weights_from_disk("/nowhere")
    assert server.called[-1] == "/collective_rpc", "it was not resumed"
    with pytest.raises(BadRequestError, match="torn"):
        adapter.continue_generation()
    server.answers["/collective_rpc"] = (200, {})
    adapter.update_weights_from_disk("/folder")
    assert server.called[-2:] == ["/collective_rpc", "/resume"]


@pytest.mark.usefixtures("fake_cuda")
def test_tensors_are_sent_as_ipc_handles(adapter: HttpServerEngineAdapter, server: FakeServer) -> None:
    tensors = [(name, torch.zeros(2, 3).as_subclass(FakeCuda)) for name in ("a", "b")]
    adapter.update_weights_from_tensor(tensors, weight_version="new", mode="in_place")
    transfer = ["/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"]
    assert server.called == ["/pause?mode=keep", *transfer, "/resume"]
    info = server.posted[3][1]["update_info"]
    given = PickledHandles(
        names=info["names"],
        dtypes=info["dtype_names"],
        shapes=info["shapes"],
        handles=info["ipc_handles_pickled"],
    )
    assert [(name, handle.shape) for name, handle in parse_ipc_handles(given, "0000-01")] == [
        ("a", [2, 3]),
        ("b", [2, 3]),
    ]
    adapter.update_weights_from_tensor(tensors)
    assert server.called.count("/init_weight_transfer_engine") == 1


def test_routes_that_the_server_lacks_name_the_remedy(adapter: HttpServerEngineAdapter, server: FakeServer) -> None:
    del server.answers["/pause"]
    with pytest.raises(BadRequestError, match="VLLM_SERVER_DEV_MODE=1"):
        adapter.pause_generation()


def test_every_sampling_setting_is_sent(adapter: HttpServerEngineAdapter, server: FakeServer) -> None:
    """vLLM would take a missing one from the model's generation config."""
    adapter.generate(input_ids=[5], rid="r", return_logprob=False)
    _, body = server.posted[-1]
    assert (body["temperature"], body["top_p"], body["top_k"], body["max_tokens"]) == (1.0, 1.0, 0, 128)
    assert (body["prompt"], body["request_id"], body["model"]) == ([5], "r", "m")


def test_requests_of_two_versions_share_no_page(adapter: HttpServerEngineAdapter, server: FakeServer) -> None:
    adapter.generate("x", extra_key="k")
    adapter.update_weights_from_disk("/folder")
    adapter.generate("x", extra_key="k")
    first, second = (body["cache_salt"] for path, body in server.posted if path == "/v1/completions")
    assert first != second


def test_namespaces_share_no_page(adapter: HttpServerEngineAdapter, server: FakeServer) -> None:
    """vLLM 0.32 permits at most 128 characters in a salt, and neither slashes nor `@`."""
    adapter.update_weights_from_disk("/folder", weight_version="13@aaaaaaaa")
    namespaces: list[dict[str, Any]] = [{}, {"extra_key": "a/b@c" * 99}, {"cache_salt": "k"}, {"extra_key": "k"}]
    for namespace in [*namespaces, {"extra_key": "k"}]:
        adapter.generate("x", **namespace)
    salts = [body["cache_salt"] for path, body in server.posted if path == "/v1/completions"]
    assert len(set(salts)) == len(namespaces) and salts[-1] == salts[-2]
    assert all(len(salt) <= 128 and not set(salt) & set("@/\\\0") for salt in salts)


def test_two_adapters_of_a_server_share_no_page_of_it(adapter: HttpServerEngineAdapter, server: FakeServer) -> None:
    """A trainer that was killed has left weights and their pages. The next one has other weights of the same number."""
    with HttpServerEngineAdapter.attach(server.url) as later:
        for trainer, incarnation in ((adapter, "aaaaaaaa"), (later, "bbbbbbbb")):
            trainer.generate("x")
            trainer.update_weights_from_disk("/folder")
            trainer.generate("x")
            trainer.update_weights_from_disk("/folder", weight_version=f"13@{incarnation}")
            assert trainer.generate("x")["meta_info"]["weight_version"] == f"13@{incarnation}"
    salts = [body["cache_salt"] for path, body in server.posted if path == "/v1/completions"]
    assert len(set(salts)) == len(salts) == 6


def test_equal_free_labels_share_no_page(adapter: HttpServerEngineAdapter, server: FakeServer) -> None:
    """The trainer, or one before it, has pushed other weights under the same label."""
    with HttpServerEngineAdapter.attach(server.url) as later:
        for trainer in (adapter, adapter, later):
            trainer.update_weights_from_disk("/folder", weight_version="13")
            assert trainer.generate("x")["meta_info"]["weight_version"] == "13"
        later.update_weight_version("14")  # the same weights
        later.generate("x")
    salts = [body["cache_salt"] for path, body in server.posted if path == "/v1/completions"]
    assert len(set(salts[:3])) == 3 and salts[3] == salts[2]


def test_a_result_without_a_known_border_has_no_spans(adapter: HttpServerEngineAdapter, server: FakeServer) -> None:
    """The version changes while the request runs."""
    running, release = threading.Event(), threading.Event()
    attached: Any = adapter._attached
    exchange = attached.generation._transport.exchange

    def slow(*arguments: Any) -> Any:
        running.set()
        assert release.wait(10)
        return exchange(*arguments)

    attached.generation._transport.exchange = slow
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(adapter.generate("x")))
    thread.start()
    assert running.wait(10)
    adapter.update_weights_from_disk("/folder", mode="in_place")
    release.set()
    thread.join(10)
    assert results[0]["meta_info"]["weight_version"].startswith("2@")
    assert "weight_versions" not in results[0]["meta_info"]


def test_memory_is_released_together(adapter: HttpServerEngineAdapter, server: FakeServer) -> None:
    with pytest.raises(BadRequestError, match="name both tags"):
        adapter.release_memory_occupation(["kv_cache"])
    adapter.release_memory_occupation()
    adapter.resume_memory_occupation(["weights"])
    adapter.resume_memory_occupation(["kv_cache"])
    assert server.called == ["/sleep?level=2", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"]


def test_a_session_stays_here(adapter: HttpServerEngineAdapter, server: FakeServer) -> None:
    adapter.generate(["x", "y"], session_id=["a", "b"])
    asyncio.run(adapter.async_generate("x", session_id="a"))
    assert len(server.posted) == 3 and not any("session" in name for _, body in server.posted for name in body)
    adapter.close_session("a")
    asyncio.run(adapter.async_close_session("b"))
    assert len(server.posted) == 3


def test_options_that_cannot_be_expressed_are_refused(adapter: HttpServerEngineAdapter) -> None:
    demands = ({"min_weight_version": "1@5f2c9a1e"}, {"exact_weight_version": 3})
    for options in ({"token_ids_logprob": [1]}, {"return_sampling_mask": True}, *demands):
        with pytest.raises(BadRequestError, match=next(iter(options))):
            adapter.generate("x", **options)  # type: ignore[call-overload]
    with pytest.raises(BadRequestError, match="stop_regex"):
        adapter.generate("x", {"stop_regex": "a+"})
    with pytest.raises(BadRequestError, match=r"2 entries for 1 prompts"):
        adapter.generate(["x"], [{}, {}])
    for empty in ([], ""):
        with pytest.raises(BadRequestError, match="prompt is empty"):
            adapter.generate(empty)
