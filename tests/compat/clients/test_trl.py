"""TRL's two clients of `vllm serve`: generation, log-probabilities, pause and resume.

Their weight transfer needs NCCL, so CUDA: `benchmarks.peers.trl_grpo` runs it on two GPUs. They import vLLM for that
transfer and for the address of the host. A placeholder stands in for vLLM here, because vLLM brings CUDA libraries.
"""

from __future__ import annotations

import math
from typing import Any

import accelerate
import pytest
import torch
from conftest import Server
from placeholders import place

pytestmark = pytest.mark.client("TRL VLLMClient", "trl")

PROMPTS = [[70, 71, 72], [80, 81]]


@pytest.fixture(scope="module", autouse=True)
def vllm() -> None:
    """TRL's client checks the version of vLLM and imports it."""
    place({"vllm": "0.27.0"})


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    """The client of `GRPOTrainer`."""
    from trl.generation.vllm_client import VLLMClient

    return VLLMClient(base_url=server.url, connection_timeout=10)


@pytest.fixture(scope="module")
def async_client(server: Server) -> Any:
    """The client of the asynchronous trainers."""
    from trl.experimental.async_grpo.vllm_client import VLLMClient

    return VLLMClient(server.url)


def test_generate(client: Any, server: Server) -> None:
    """`generate` with its defaults (`top_k=0`, `logprobs=0`): ids, and the log-probability of every sampled token."""
    answer = client.generate(PROMPTS, n=2, max_tokens=6, generation_kwargs={"ignore_eos": True, "seed": 3})
    assert answer["prompt_ids"] == PROMPTS
    assert [len(ids) for ids in answer["completion_ids"]] == [6] * 4
    for ids, logprobs, token_ids in zip(
        answer["completion_ids"], answer["logprobs"], answer["logprob_token_ids"], strict=True
    ):
        assert token_ids == [[token] for token in ids]
        assert all(len(values) == 1 and values[0] <= 0 and math.isfinite(values[0]) for values in logprobs)
    greedy = client.generate(PROMPTS, temperature=0.0, max_tokens=6, generation_kwargs={"ignore_eos": True})
    assert greedy["completion_ids"] == [server.greedy(prompt, 6) for prompt in PROMPTS]


def test_generate_top_logprobs(client: Any) -> None:
    """`generate` with `logprobs=3` and text prompts: candidates in descending order, the sampled token among them."""
    answer = client.generate(["Hello"], max_tokens=5, logprobs=3, generation_kwargs={"ignore_eos": True, "seed": 1})
    for token, ids, values in zip(
        answer["completion_ids"][0], answer["logprob_token_ids"][0], answer["logprobs"][0], strict=True
    ):
        assert token in ids and 3 <= len(ids) <= 4 and values == sorted(values, reverse=True)


def test_generate_regex(client: Any) -> None:
    """`generate` with `structured_outputs_regex`: the text matches."""
    answer = client.generate(["Date: "], max_tokens=20, structured_outputs_regex="[0-9]{4}-[0-9]{2}")
    text = "".join(chr(33 + token - 5) for token in answer["completion_ids"][0][:7])
    assert text[:4].isdigit() and text[4] == "-" and text[5:].isdigit(), text


def test_chat(client: Any) -> None:
    """`chat`: conversations, tools rendered with `tool_choice="none"`, ids of prompts and completions."""

    def get_weather(city: str) -> str:
        """
        Return the weather.

        Args:
            city: Name of the city.
        """
        return city

    messages = [[{"role": "user", "content": "Hello"}], [{"role": "user", "content": "Bye"}]]
    answer = client.chat(messages, n=2, max_tokens=6, generation_kwargs={"ignore_eos": True})
    assert len(answer["prompt_ids"]) == 2 and [len(ids) for ids in answer["completion_ids"]] == [6] * 4
    with_tools = client.chat(messages, max_tokens=6, tools=[get_weather], generation_kwargs={"ignore_eos": True})
    assert len(with_tools["prompt_ids"][0]) > len(answer["prompt_ids"][0])
    assert [len(values) for values in with_tools["logprobs"]] == [6, 6]


def test_sequence_logprobs(client: Any) -> None:
    """`get_sequence_logprobs`: a teacher's log-probabilities are those that generation reported."""
    made = client.generate(PROMPTS, temperature=0.0, max_tokens=6, generation_kwargs={"ignore_eos": True})
    sequences = [prompt + ids for prompt, ids in zip(PROMPTS, made["completion_ids"], strict=True)]
    scored = client.get_sequence_logprobs(sequences, [len(prompt) for prompt in PROMPTS], top_logprobs=2)
    for prompt, ids, logprobs in zip(PROMPTS, made["completion_ids"], scored["logprobs"], strict=True):
        assert len(logprobs) == len(ids), prompt
    actual = [[values[0] for values in row] for row in scored["actual_logprobs"]]
    expected = [[values[0] for values in row] for row in made["logprobs"]]
    for row, other in zip(actual, expected, strict=True):
        assert row == pytest.approx(other, abs=1e-4)


def test_information(client: Any, async_client: Any, server: Server) -> None:
    """Both clients read the world size, the dtype, the length of the context and the configuration."""
    assert client.get_world_size() == async_client.get_world_size() == 1
    assert client.get_server_info()["parallel_config"]["world_size"] == 1
    accelerate.PartialState()  # as every trainer does: the client's logger needs it
    async_client.wait_for_server_ready()
    assert async_client.get_max_model_len() == 4096 and async_client.get_dtype() == "torch.float32"


def test_pause(async_client: Any, client: Any, server: Server) -> None:
    """`pause` (keep) and `resume`: the server reports the pause, and generates again afterwards."""
    async_client.pause()
    assert server.get("/is_paused")["is_paused"] is True
    async_client.resume()
    assert server.get("/is_paused")["is_paused"] is False
    client.reset_prefix_cache()
    assert len(server.greedy([70], 4)) == 4


def test_weight_transfer(client: Any) -> None:
    """The weight transfer refuses to run without CUDA, in the client itself; `benchmarks.peers.trl_grpo` runs it."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: run benchmarks.peers.trl_grpo")
    with pytest.raises(Exception, match=r"(?i)cuda|device|NoneType"):
        client.init_communicator(device="cpu")
