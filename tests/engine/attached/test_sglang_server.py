"""SGLang's wire, against a server that speaks it: ours, taken for a genuine SGLang server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.attached.conftest import Start
from verl_server import HttpServerEngineAdapter
from verl_server.engine import http
from verl_server.engine.attached.sglang_server import SglangServer
from verl_server.errors import BadRequestError, VerlServerError, WeightUpdateError
from verl_server.models.tiny import make_model_folder
from verl_server.weight_version import WeightVersion

PAUSES: Any = {path: (200, {}) for path in ("/pause_generation", "/continue_generation", "/flush_cache")}
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [make_model_folder(tmp_path_factory.mktemp("model"), "llama", seed=seed) for seed in (0, 9)]


@pytest.fixture(scope="module")
def launched(folders: list[Path]) -> Iterator[HttpServerEngineAdapter]:
    with HttpServerEngineAdapter(model_path=str(folders[0]), port=0, device="cpu", kv_cache_gib=0.1) as engine:
        yield engine


@pytest.fixture
def attached(launched: HttpServerEngineAdapter, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpServerEngineAdapter]:
    monkeypatch.setattr(
        http,
        "identify",
        lambda transport, url, first: SglangServer(transport, url, {"version": "0.5.16", "tp_size": 1}),
    )
    with HttpServerEngineAdapter.attach(launched.url or "", admin_api_key=launched.admin_api_key) as adapter:
        yield adapter


@pytest.fixture
def shared_files() -> Iterator[None]:
    before = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    yield
    torch.multiprocessing.set_sharing_strategy(before)  # type: ignore[no-untyped-call]


@pytest.mark.usefixtures("shared_files")
@pytest.mark.parametrize("mode", ["wait", "in_place", "retract", "abort"])
def test_tensors_are_pushed(
    attached: HttpServerEngineAdapter, launched: HttpServerEngineAdapter, folders: list[Path], mode: Any
) -> None:
    tokens = []
    for checkpoint in (1, 0):
        weights = load_file(folders[checkpoint] / "model.safetensors")
        attached.update_weights_from_tensor(weights.items(), weight_version=f"{mode}{checkpoint}", mode=mode)
        result: Any = attached.generate("hello", GREEDY, return_logprob=True)
        assert result["meta_info"]["weight_version"] == f"{mode}{checkpoint}"
        launched.update_weights_from_disk(str(folders[checkpoint]))
        assert launched.generate("hello", GREEDY)["output_ids"] == result["output_ids"]
        tokens.append(result["output_ids"])
    assert tokens[0] != tokens[1]
    assert not launched.get_internal_state()["paused"]


def test_weights_from_disk_and_control(attached: HttpServerEngineAdapter, folders: list[Path]) -> None:
    attached.update_weights_from_disk(str(folders[1]), weight_version="disk")
    assert attached.get_model_info()["weight_version"] == "disk"
    attached.pause_generation("in_place")
    attached.continue_generation()
    assert attached.flush_cache()
    attached.abort_request(abort_all=True)


def test_cpu_tensors_need_files(attached: HttpServerEngineAdapter) -> None:
    with pytest.raises(BadRequestError, match="set_sharing_strategy"):
        attached.update_weights_from_tensor([("a", torch.zeros(2))])


def test_what_the_wire_lacks_is_refused_by_name(attached: HttpServerEngineAdapter) -> None:
    with pytest.raises(BadRequestError, match="keeps no registered weights"):
        attached.push_weights()
    with pytest.raises(BadRequestError, match=r"cannot honor partial=False"):
        attached.update_weights_from_tensor([("a", torch.zeros(2))], partial=False)
    for field in ("partial", "strict_dtype"):
        with pytest.raises(BadRequestError, match=rf"cannot honor {field}"):
            attached.update_weights_from_distributed(["a"], ["float32"], [[2]], **{field: field == "strict_dtype"})
    with pytest.raises(BadRequestError, match="does not offer"):
        attached.begin_weight_update()


def test_a_failed_update_in_place_stays_paused(start: Start) -> None:
    server = start(
        {
            "/server_info": (200, {"version": "0.5.16", "internal_states": [{}]}),
            "/pause_generation": (200, {}),
            "/flush_cache": (400, {}),
            "/update_weights_from_disk": (400, {"success": False, "message": "no such folder"}),
        }
    )
    update = ["/flush_cache?timeout=0.0", "/begin_weight_update", "/update_weights_from_disk"]
    with HttpServerEngineAdapter.attach(server.url) as adapter:
        with pytest.raises(VerlServerError, match="no such folder Generation stays paused"):
            adapter.update_weights_from_disk("/nowhere", mode="in_place")
        assert server.called == ["/pause_generation", *update]
        server.answers["/update_weights_from_disk"] = (200, {"success": True, "message": "ok"})
        server.answers["/continue_generation"] = (200, {})
        adapter.update_weights_from_disk("/folder")
    assert server.called == ["/pause_generation", *update, *update, "/continue_generation"]


@pytest.mark.parametrize("paused_by_caller", [False, True])
def test_an_update_never_empties_the_cache_of_held_requests(start: Start, paused_by_caller: bool) -> None:
    """A genuine server would end. With "retract" the requests would read pages of the old weights."""
    server = start(
        {
            "/server_info": (200, {"version": "0.5.16", "internal_states": [{}]}),
            "/pause_generation": (200, {}),
            "/continue_generation": (200, {}),
            "/flush_cache": (400, {}),
            "/update_weights_from_disk": (200, {"success": True, "message": "ok"}),
        }
    )
    with HttpServerEngineAdapter.attach(server.url) as adapter:
        for mode in ("retract", "in_place"):
            server.posted.clear()
            if paused_by_caller:
                adapter.pause_generation(mode)
            if mode == "retract":
                with pytest.raises(WeightUpdateError, match="cannot empty its prefix cache"):
                    adapter.update_weights_from_disk("/folder", mode=mode)
                assert server.called[-1] == ("/flush_cache?timeout=0.0" if paused_by_caller else "/continue_generation")
                adapter.update_weights_from_disk("/folder", mode=mode, flush_cache=False)
            else:
                adapter.update_weights_from_disk("/folder", mode=mode)
            (update,) = [body for path, body in server.posted if path == "/update_weights_from_disk"]
            assert update["flush_cache"] is False
            assert (server.called[-1] == "/continue_generation") is not paused_by_caller
            adapter.continue_generation()
        assert not adapter.flush_cache()
        with pytest.raises(BadRequestError, match='no pause "wait"'):
            adapter.pause_generation("wait")


def test_an_update_without_a_label_gets_a_new_one(start: Start) -> None:
    """SGLang would keep the label of the weights before. The next adapter must not count the same labels again."""
    answers: Any = PAUSES | {
        "/server_info": (200, {"version": "0.5.16", "internal_states": [{}]}),
        "/update_weights_from_disk": (200, {"success": True, "message": "ok"}),
    }
    server = start(answers)
    for label in (None, None, "13"):
        with HttpServerEngineAdapter.attach(server.url) as adapter:
            adapter.update_weights_from_disk("/folder", weight_version=label)
            adapter.update_weights_from_disk("/folder")
    labels = [body["weight_version"] for path, body in server.posted if path == "/update_weights_from_disk"]
    assert len(set(labels)) == 6 and labels[4] == "13"
    assert [WeightVersion.parse(label) is None for label in labels] == [False] * 4 + [True, False]


def test_a_demand_on_the_weight_version_is_refused(start: Start) -> None:
    """SGLang would ignore the field, and the caller would trust the answer."""
    server = start({"/server_info": (200, {"version": "0.5.23", "internal_states": [{}]})})
    with HttpServerEngineAdapter.attach(server.url) as adapter:
        for demand in ({"min_weight_version": "1@5f2c9a1e"}, {"exact_weight_version": 3}):
            with pytest.raises(BadRequestError, match=f"{next(iter(demand))} needs a verl-server"):
                adapter.generate(input_ids=[5], **demand)  # type: ignore[call-overload]
            with pytest.raises(BadRequestError, match="needs a verl-server"):
                asyncio.run(adapter.async_generate(input_ids=[5], **demand))  # type: ignore[call-overload]
            with pytest.raises(BadRequestError, match="needs a verl-server"):
                list(adapter.generate(input_ids=[5], stream=True, **demand))  # type: ignore[call-overload]
    assert not server.posted


def test_a_session_stays_here(start: Start) -> None:
    """SGLang 0.5.23 takes one id for a whole batch, and keeps what its own cache knows of a session until its end."""
    result = {"text": "", "output_ids": [1], "meta_info": {}}
    server = start(
        {"/server_info": (200, {"version": "0.5.23", "internal_states": [{}]}), "/generate": (200, [result, result])}
    )
    with HttpServerEngineAdapter.attach(server.url) as adapter:
        adapter.generate(input_ids=[[5], [6]], session_id=["a", "b"])
        asyncio.run(adapter.async_generate(input_ids=[[5], [6]], session_id="a"))
        adapter.close_session("a")
        asyncio.run(adapter.async_close_session("b"))
    assert server.called == ["/generate"] * 2
    assert all(body["input_ids"] == [[5], [6]] and "session_id" not in body for _, body in server.posted)


@pytest.mark.usefixtures("shared_files")
def test_each_rank_gets_an_entry_and_newer_servers_a_transaction(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """The adapter says once that it does not know which parameters a push lacks."""
    server = start(
        PAUSES
        | {
            "/server_info": (200, {"version": "0.5.23", "tp_size": 2, "internal_states": [{}]}),
            "/begin_weight_update": (200, {}),
            "/update_weights_from_tensor": (200, {"success": True, "message": "ok"}),
            "/end_weight_update": (200, {}),
        }
    )
    with HttpServerEngineAdapter.attach(server.url) as adapter, caplog.at_level("WARNING"):
        adapter.update_weights_from_tensor([("a", torch.zeros(2))], weight_version="v", partial=True)
        assert not caplog.records, "the caller knows"
        for _ in range(2):
            server.called.clear()
            server.posted.clear()
            adapter.update_weights_from_tensor([("a", torch.zeros(2))], weight_version="v")
    (record,) = caplog.records
    assert "SGLang 0.5.23" in record.message and "nothing checks that pushes to it are whole" in record.message
    update = ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"]
    paused = ["/pause_generation", "/flush_cache?timeout=0.0", "/flush_cache?timeout=0.0"]
    assert server.called[0].startswith("/flush_cache?timeout="), "it waits for an idle server"
    assert server.called[1:] == [*paused, *update, "/continue_generation"]
    body = server.posted[5][1]
    assert len(body["serialized_named_tensors"]) == 2
    assert body["weight_version"] == "v" and body["flush_cache"] is False


def test_an_update_that_waits_is_refused_by_a_server_that_stays_busy(start: Start) -> None:
    server = start({"/server_info": (200, {"version": "0.5.16", "internal_states": [{}]}), "/flush_cache": (400, {})})
    with HttpServerEngineAdapter.attach(server.url) as adapter:
        with pytest.raises(WeightUpdateError, match="was not idle within"):
            adapter.update_weights_from_disk("/folder")
        assert [path.partition("?")[0] for path in server.called] == ["/flush_cache"]
        server.answers["/update_weights_from_disk"] = (200, {"success": True, "message": "ok"})
        adapter.update_weights_from_disk("/folder", flush_cache=False)
        assert server.called[1:] == ["/begin_weight_update", "/update_weights_from_disk"]
