"""The facts about SGLang on which this package relies, in every recording of a genuine SGLang (`record_sglang`).

A fact that fails with the recording of a new version is what changed in SGLang. Each test names its records.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

FILES = sorted((Path(__file__).parent / "recordings").glob("sglang-*.jsonl"))
PAGES = [0, 0, 39, 0, 39, 0, 0]
"""Cached tokens of a prompt of 40: without a key, a, a, b, without a key, and after a flush a, without a key."""


class Recording:
    def __init__(self, file: Path) -> None:
        self._records = [json.loads(line) for line in file.read_text().splitlines()]

    def all(self, what: str) -> list[Any]:
        return [record for record in self._records if record["what"] == what]

    def answer(self, what: str) -> Any:
        (record,) = self.all(what)
        assert "answer" in record, record
        return record["answer"]

    def status(self, what: str) -> tuple[int, Any]:
        answer = self.answer(f"http: {what}")
        return answer["status"], answer.get("body")

    def went_unanswered(self, what: str) -> bool:
        """Return True if the process that held SGLang ended during the call."""
        return not self.all(what) or "error" in self.all(what)[0]


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def sglang(request: pytest.FixtureRequest) -> Recording:
    return Recording(request.param)


def test_there_is_a_recording() -> None:
    assert FILES and all(file.stat().st_size < 200_000 for file in FILES)


# -- attach ------------------------------------------------------------------------------------------------------------


def test_what_identifies_a_server(sglang: Recording) -> None:
    info = sglang.answer("http: /server_info")
    assert info["internal_states"][0] and info["tp_size"] == 1 and info["version"]
    assert "scheduler_info" not in info, "identify takes a server with this field for one of ours"
    status, model = sglang.status("/model_info")
    assert status == 200 and model["weight_version"] == "default" and model["model_path"]
    assert sglang.status("/version")[0] == 404, "identify takes a server with a version for vLLM"


def test_results_have_our_form(sglang: Recording) -> None:
    status, result = sglang.status("generate")
    meta = result["meta_info"]
    assert status == 200 and len(result["output_ids"]) == meta["completion_tokens"] == 6
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert meta["weight_version"] == "default"
    assert [token for _, token, *_ in meta["output_token_logprobs"]] == result["output_ids"]
    assert [len(best) for best in meta["output_top_logprobs"]] == [2] * 6
    assert len(meta["input_token_logprobs"]) == 4
    assert sglang.status("generate, unknown fields")[0] == 200, "the adapter asks for columns"


def test_bad_input_is_refused(sglang: Recording) -> None:
    for what in ("generate, bad temperature", "generate, too long"):
        status, body = sglang.status(what)
        assert status == 400 and body["error"]["message"]
    assert sglang.status("generate, unknown sampling parameter")[0] == 500


def test_streams_are_cumulative(sglang: Recording) -> None:
    frames = sglang.answer("http: stream")
    assert all(frames[-1][: len(frame)] == frame for frame in frames) and len(frames[-1]) == 6
    frames = [ids for ids, _ in sglang.answer("engine: stream")]
    assert all(frames[-1][: len(ids)] == ids for ids in frames) and len(frames[-1]) == 6
    assert sum(len(ids) for ids, _ in sglang.answer("engine: incremental stream")) == 6


def test_control_routes(sglang: Recording) -> None:
    assert sglang.status("begin_weight_update")[0] == 404, "newer servers need it around updates"
    assert sglang.status("pause wait")[0] == 400
    status, body = sglang.status("update from a missing folder")
    assert status == 400 and body["success"] is False and body["message"]
    status, body = sglang.status("update from disk")
    assert status == 200 and body["success"] is True
    for what in ("update_weight_version", "flush_cache", "release_memory_occupation", "resume_memory_occupation"):
        assert sglang.status(what)[0] == 200
    assert sglang.status("destroy an unknown group")[0] == 400
    assert sglang.status("abort nobody")[0] == 200


def test_wrong_names_are_ignored(sglang: Recording) -> None:
    status, body = sglang.status("a name that the model lacks")
    assert status == 200 and body["success"] is True


def test_bytes_in_payloads(sglang: Recording) -> None:
    by_protocol = {record["arguments"]["protocol"]: record for record in sglang.all("payload: bytes")}
    assert "_codecs.encode" in by_protocol[2]["error"]
    assert "answer" in by_protocol[3], "sglang_payload writes protocol 3"


def test_an_abort_takes_a_prefix(sglang: Recording) -> None:
    answer = sglang.answer("abort: by prefix")
    assert answer["job-1"]["type"] == answer["job-12"]["type"] == "abort" and answer["other runs on"]
    assert sglang.answer("abort: all")["meta_info"]["finish_reason"]["type"] == "abort"


def test_pages_have_a_namespace(sglang: Recording) -> None:
    assert [record["answer"] for record in sglang.all("extra_key: cached tokens")] == PAGES


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_a_pause(sglang: Recording, mode: str) -> None:
    answer = sglang.answer(f"pause: {mode}")
    aborted = mode == "abort"
    assert answer["pause"]["status"] == answer["continue"]["status"] == 200
    assert answer["new request waits"] and answer["ended in the pause"] is aborted
    assert answer["flush"]["status"] == (200 if aborted else 400), "held requests keep the cache from being emptied"
    assert answer["update without flush"]["status"] == 200
    meta = answer["running"]["meta_info"]
    assert meta["finish_reason"]["type"] == ("abort" if aborted else "length")
    assert meta["num_retractions"] == (1 if mode == "retract" else 0)
    assert (meta["weight_version"] == f"in {mode}") is not aborted
    assert answer["held"]["weight_version"] == f"in {mode}"
    assert (answer["held"]["cached_tokens"] > 0) is not aborted, "without a flush, old pages are read"


def test_an_update_that_cannot_empty_the_cache_ends_the_server(sglang: Recording) -> None:
    assert sglang.went_unanswered("http: an update with flush_cache while a request is held")
    assert sglang.answer("http: the server ended") is True


# -- the engine in process ---------------------------------------------------------------------------------------------


def test_the_hook_gets_tensors_in_the_schedulers_main_thread(sglang: Recording) -> None:
    facts = sglang.answer("hook: what arrives")
    assert facts["is_main_thread"] and not facts["is_process_of_caller"]
    assert facts["container"] == "list" and facts["entries"] == ["tuple", "tuple"]
    assert [tensor[:3] for tensor in facts["tensors"]] == [["a", "torch.float32", [2, 3]], ["b", "torch.bfloat16", [4]]]
    assert sglang.answer("hook: returns junk")[0] is True


def test_a_hook_that_raises_and_an_unknown_format_end_the_engine(sglang: Recording) -> None:
    for what in ("hook: raises", "load_format: unknown"):
        assert sglang.all(f"{what}, is sent") and sglang.went_unanswered(what)
    assert sglang.answer("part: engine") != 0 and sglang.answer("part: load_format") != 0


def test_an_unknown_rpc_is_refused_and_harmless(sglang: Recording) -> None:
    (record,) = sglang.all("rpc: unknown method")
    assert "no_such_method" in record["error"]
    assert len(sglang.answer("engine: after the rpc")["output_ids"]) == 6
