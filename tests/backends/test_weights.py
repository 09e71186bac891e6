"""Every engine serves one version at a time, whole, and says which token has which."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.backends.conftest import UNREAD
from tests.backends.served import DEVICE, LONG_PROMPT, PACKS_WEIGHTS, PROMPT, RUNNING, Served
from tests.parity.harness import random_prompt
from tests.waiting import eventually
from verl_server import (
    BadRequestError,
    ServerUnavailableError,
    VersionBehindError,
    VersionSupersededError,
    WeightUpdateError,
)
from verl_server.weight_sync.checksum import tensor_checksum
from verl_server.weight_sync.group.broadcast import broadcast_weights, init_weights_update_group


def served_checkpoint(served: Served) -> int | None:
    """Return the checkpoint whose tokens and log-probabilities the engine generates; None for neither."""
    reply = served.generate(tokens=6)
    for checkpoint in (0, 1):
        rows = served.logprobs(PROMPT + reply["output_ids"], checkpoint)[len(PROMPT) - 1 : -1]
        found = reply["meta_info"]["output_token_logprobs"]
        if all(
            abs(logprob - float(row[token])) < served.tolerance
            for (logprob, token, _), row in zip(found, rows, strict=True)
        ):
            return checkpoint
    return None


def test_fifty_pushes(fresh: Served) -> None:
    for i in range(1, 51):
        label = fresh.push(i % 2)
        reply = fresh.generate(tokens=4)
        assert fresh.judge(PROMPT, reply) == [label]


def test_pushes_of_registered_weights(fresh: Served) -> None:
    weights = {name: tensor.clone() for name, tensor in fresh.checkpoints[0].items()}
    fresh.adapter.register_weights(lambda: weights.items())
    try:
        for checkpoint in (1, 0, 1):
            for name, tensor in weights.items():
                tensor.copy_(fresh.checkpoints[checkpoint][name])
            fresh.adapter.push_weights()
            assert served_checkpoint(fresh) == checkpoint
    finally:
        fresh.adapter.unregister_weights()


def test_a_checkpoint_on_disk(fresh: Served) -> None:
    fresh.adapter.update_weights_from_disk(str(fresh.folders[1]), weight_version="from-disk")
    assert served_checkpoint(fresh) == 1
    assert fresh.generate(tokens=1)["meta_info"]["weight_version"] == "from-disk"


def test_no_page_of_old_weights_is_read(fresh: Served) -> None:
    fresh.generate(LONG_PROMPT, tokens=2)
    label = fresh.push(1)
    reply = fresh.generate(LONG_PROMPT, tokens=2)
    assert reply["meta_info"]["cached_tokens"] == 0
    assert fresh.judge(LONG_PROMPT, reply) == [label]


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.q_norm.weight"])
def test_parameters_are_read_by_name(fresh: Served, name: str) -> None:
    fresh.push(1)
    rows = fresh.adapter.get_weights_by_name(name, truncate_size=3)
    assert torch.equal(torch.tensor(rows), fresh.checkpoints[1][name][:3])


def test_checksums_are_those_of_the_pushed_tensors(fresh: Served) -> None:
    fresh.push(1)
    payload = fresh.adapter.weights_checker("checksum", skip_tensor_list=["proj", "embed_tokens", "lm_head"])
    checksums = payload["ranks"][0]["checksums"]
    assert len(checksums) == 9, "norms"
    assert all(tensor_checksum(fresh.checkpoints[1][name]) == found for name, found in checksums.items())


def test_a_parameter_in_a_layout_of_the_engine_is_refused(fresh: Served) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    if fresh.engine not in PACKS_WEIGHTS:
        rows = fresh.adapter.get_weights_by_name(name, truncate_size=2)
        assert torch.equal(torch.tensor(rows), fresh.checkpoints[0][name][:2])
        return
    with pytest.raises(BadRequestError, match="layout of its own"):
        fresh.adapter.get_weights_by_name(name)
    with pytest.raises(BadRequestError, match=r"layout of its own.*skip_tensor_list"):
        fresh.adapter.weights_checker("checksum")


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_running_requests_continue_under_new_weights(fresh: Served, mode: str) -> None:
    fate: Any = {"in_place": "kept", "retract": "recomputed"}[mode]
    with ThreadPoolExecutor(2) as pool:
        running = [fresh.begin(pool, prompt) for prompt in (PROMPT, LONG_PROMPT)]
        labels = [fresh.push(checkpoint, mode, fate) for checkpoint in (1, 0)]
        for prompt, request in zip((PROMPT, LONG_PROMPT), running, strict=True):
            reply = request.result(60)
            assert fresh.judge(prompt, reply)[-2:] == labels
            assert len(reply["output_ids"]) == RUNNING


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_prompts_of_several_chunks_while_weights_change(fresh: Served, mode: Any) -> None:
    """No request mixes the versions of its prompt, whatever chunk is computed when an update comes."""
    fate: Any = {"in_place": "kept", "retract": "recomputed"}[mode]
    prompts = [random_prompt(length, seed=length) for length in (5000, 300, 4000, 40)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = [pool.submit(fresh.generate, prompt, tokens=30) for prompt in prompts]
        for i in range(1, 7):
            fresh.push(i % 2, mode, fate)
        for prompt, reply in zip(prompts, replies, strict=True):
            fresh.judge(prompt, reply.result(120))


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_request_for_one_version_ends_where_the_next_version_begins(fresh: Served, mode: Any) -> None:
    fate: Any = {"in_place": "kept", "retract": "recomputed"}[mode]
    demanded = fresh.push(0)
    with ThreadPoolExecutor(1) as pool:
        running = fresh.begin(pool, tokens=2 * RUNNING, exact_weight_version=demanded)
        served = fresh.push(1, mode, fate)
        reply = running.result(60)
    meta = reply["meta_info"]
    assert fresh.judge(PROMPT, reply) == [demanded] == [meta["weight_version"]] == [meta["weight_version_start"]]
    assert 0 < meta["output_token_logprobs_length"] == len(reply["output_ids"]) < 2 * RUNNING
    assert (meta["finish_reason"]["type"], meta["finish_reason"]["status_code"]) == ("abort", 409)
    assert f"exact_weight_version={demanded!r}" in meta["finish_reason"]["message"]
    with pytest.raises(VersionSupersededError, match=f"serves {served!r}"):
        fresh.generate(exact_weight_version=demanded)
    with pytest.raises(VersionBehindError, match=f"serves {served!r}"):
        fresh.generate(exact_weight_version="a version of tomorrow")
    assert fresh.judge(PROMPT, fresh.generate(exact_weight_version=served)) == [served]


def test_a_waiting_request_for_a_superseded_version_gets_an_error(fresh: Served) -> None:
    demanded = fresh.push(0)
    fresh.adapter.pause_generation("in_place")
    with ThreadPoolExecutor(2) as pool:
        demanding = pool.submit(fresh.generate, exact_weight_version=demanded)
        other = pool.submit(fresh.generate)
        assert eventually(lambda: fresh.adapter.get_internal_state()["num_waiting_reqs"] == 2)
        served = fresh.push(1)
        with pytest.raises(VersionSupersededError):
            demanding.result(60)
        fresh.adapter.continue_generation()
        assert fresh.judge(PROMPT, other.result(60)) == [served]


def test_abort_ends_running_requests(fresh: Served) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = fresh.begin(pool, tokens=2 * RUNNING)
        fresh.push(1, "abort", "ended")
        reply = running.result(60)
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(fresh.judge(PROMPT, reply)) == 1


def test_wait_lets_running_requests_finish(fresh: Served) -> None:
    with ThreadPoolExecutor(2) as pool:
        running = fresh.begin(pool, tokens=200)
        label = fresh.push(1, "wait", "ended")
        reply = running.result(60)
    assert len(reply["output_ids"]) == 200
    assert fresh.judge(PROMPT, reply) != [label]
    assert fresh.judge(PROMPT, fresh.generate(tokens=3)) == [label]


def test_a_transaction_of_single_tensors_is_served_as_a_whole(fresh: Served) -> None:
    fresh.adapter.begin_weight_update()
    *parts, last = fresh.checkpoints[1].items()
    for part in parts:
        fresh.adapter.update_weights_from_tensor([part])
    with pytest.raises(WeightUpdateError, match=rf"1 parameters are missing \('{last[0]}'\)"):
        fresh.adapter.end_weight_update(weight_version="whole")
    fresh.adapter.update_weights_from_tensor([last])
    fresh.adapter.end_weight_update(weight_version="whole")
    assert served_checkpoint(fresh) == 1
    assert fresh.generate(tokens=1)["meta_info"]["weight_version"] == "whole"


def test_a_discarded_transaction_is_never_served(fresh: Served) -> None:
    names = list(fresh.checkpoints[1])
    fresh.adapter.begin_weight_update()
    fresh.adapter.update_weights_from_tensor([(names[0], fresh.checkpoints[1][names[0]])])
    fresh.adapter.end_weight_update(discard=True)
    with pytest.raises(ServerUnavailableError, match="torn"):
        fresh.generate()
    fresh.push(1)
    assert served_checkpoint(fresh) == 1


@pytest.mark.parametrize("fault", ["unknown name", "other shape", "missing", "checksum"])
def test_a_refused_update_changes_nothing(fresh: Served, fault: str) -> None:
    weights = dict(fresh.checkpoints[1])
    options: dict[str, Any] = {}
    last = next(reversed(weights))
    match fault:
        case "unknown name":
            weights["model.nothing"] = torch.zeros(3)
        case "other shape":
            weights[last] = torch.zeros(3)
        case "missing":
            del weights[last]
        case "checksum":
            options["checksums"] = {last: tensor_checksum(fresh.checkpoints[0][last])}
    with pytest.raises(WeightUpdateError):
        fresh.adapter.update_weights_from_tensor(list(weights.items()), **options)
    assert served_checkpoint(fresh) == 0


def test_weights_with_nan_are_not_served(fresh: Served) -> None:
    weights = {name: tensor.clone() for name, tensor in fresh.checkpoints[1].items()}
    weights["model.norm.weight"][3] = torch.nan
    with pytest.raises(WeightUpdateError, match="NaN"):
        fresh.adapter.update_weights_from_tensor(list(weights.items()))
    with pytest.raises(ServerUnavailableError, match="NaN"):
        fresh.generate()
    fresh.push(1)
    assert served_checkpoint(fresh) == 1


def test_a_part_of_a_fused_module(fresh: Served) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    update = [(name, fresh.checkpoints[1][name])]
    with pytest.raises(WeightUpdateError, match=r"lacks 24 of 25.*partial=True"):
        fresh.adapter.update_weights_from_tensor(update)
    if fresh.engine not in PACKS_WEIGHTS:
        assert "Not covered: " in fresh.adapter.update_weights_from_tensor(update, partial=True)[1]
        return
    with pytest.raises(WeightUpdateError, match=r"as a whole.*k_proj"):
        fresh.adapter.update_weights_from_tensor(update, partial=True)
    assert served_checkpoint(fresh) == 0


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_holds_running_and_new_requests(fresh: Served, mode: Any) -> None:
    with ThreadPoolExecutor(2) as pool:
        running = fresh.begin(pool)
        fresh.adapter.pause_generation(mode=mode)
        new = pool.submit(fresh.generate, LONG_PROMPT)
        assert eventually(lambda: _state(fresh)["num_waiting_reqs"] + _state(fresh)["num_running_reqs"] == 2, 60)
        assert _state(fresh)["paused"] and not running.done() and not new.done()
        label = fresh.push(1, fate="kept" if mode == "in_place" else "recomputed")
        fresh.adapter.continue_generation()
        reply = running.result(60)
        assert fresh.judge(PROMPT, reply)[-1] == label
        assert fresh.judge(LONG_PROMPT, new.result(60)) == [label]


def test_a_pause_that_waits_or_aborts(fresh: Served) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = fresh.begin(pool, tokens=100)
        fresh.adapter.pause_generation(mode="wait")
        assert len(running.result(60)["output_ids"]) == 100
        fresh.adapter.continue_generation()
        running = fresh.begin(pool, tokens=2 * RUNNING)
        fresh.adapter.pause_generation(mode="abort")
        assert running.result(60)["meta_info"]["finish_reason"]["type"] == "abort"


def test_weights_from_a_process_group(fresh: Served) -> None:
    with init_weights_update_group([fresh.adapter], "127.0.0.1", backend="gloo", device="cpu") as group:
        for checkpoint in (1, 0):
            broadcast_weights(group, fresh.checkpoints[checkpoint].items(), partial=False)
            assert served_checkpoint(fresh) == checkpoint
        fresh.adapter.begin_weight_update()
        broadcast_weights(group, fresh.checkpoints[1].items(), bucket_bytes=1 << 16)
        fresh.adapter.end_weight_update()
        assert served_checkpoint(fresh) == 1


def test_memory(fresh: Served) -> None:
    fresh.adapter.abort_request(abort_all=True)
    assert eventually(lambda: _state(fresh)["num_running_reqs"] == 0, 60)
    releases = fresh.adapter.get_server_info()["enable_memory_saver"]
    assert releases == (fresh.engine == "embedded" or DEVICE == "cuda")
    if releases:
        fresh.adapter.release_memory_occupation()
        fresh.adapter.resume_memory_occupation()
        fresh.push(0)
    else:
        with pytest.raises(BadRequestError, match="cannot release memory"):
            fresh.adapter.release_memory_occupation()
    assert served_checkpoint(fresh) == 0


def test_experts(served_experts: Served) -> None:
    assert served_checkpoint(served_experts) == 0
    for i in range(1, 4):
        served_experts.push(i % 2)
        assert served_checkpoint(served_experts) == i % 2
    weights = load_file(served_experts.folders[1] / "model.safetensors")
    served_experts.adapter.begin_weight_update()
    for name, tensor in weights.items():
        served_experts.adapter.update_weights_from_tensor([(name, tensor)])
    served_experts.adapter.end_weight_update()
    assert served_checkpoint(served_experts) == 1


def test_experts_as_transformers_names_them(served_experts: Served) -> None:
    for checkpoint in (0, 1):
        named = list(served_experts.model(checkpoint).named_parameters())
        assert any(name.endswith("experts.gate_up_proj") for name, _ in named)
        served_experts.adapter.update_weights_from_tensor(named)
        assert served_checkpoint(served_experts) == checkpoint


def test_an_expert_is_missing(served_experts: Served) -> None:
    """A push with all experts but one is refused, whether the experts come one by one or in stacks.

    The tensor of the checkpoint that the engine does not read may come, and is not missing.
    """
    weights = load_file(served_experts.folders[1] / "model.safetensors")
    lost = next(name for name in reversed(weights) if ".experts." in name)
    del weights[lost]
    assert UNREAD in weights
    before = served_checkpoint(served_experts)
    with pytest.raises(WeightUpdateError, match=rf"lacks 1 of \d+; missing: '{lost}'"):
        served_experts.adapter.update_weights_from_tensor(list(weights.items()))
    named = [p for p in served_experts.model(1).named_parameters() if not p[0].endswith("0.mlp.experts.gate_up_proj")]
    with pytest.raises(WeightUpdateError, match=r"missing: 'model\.layers\.0\.mlp\.experts\.0\."):
        served_experts.adapter.update_weights_from_tensor(named)
    assert served_checkpoint(served_experts) == before


def _state(served: Served) -> dict[str, Any]:
    state: dict[str, Any] = dict(served.adapter.get_server_info()["internal_states"][0])
    return state
