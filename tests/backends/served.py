"""`Served`: one engine under the contract suite, and what transformers says about its outputs."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.parity.harness import CPU_KERNELS, random_prompt
from tests.parity.span_judge import Fate, SpanJudge, Version
from verl_server import HttpServerEngineAdapter

DEVICE = os.environ.get("VERL_SERVER_TEST_DEVICE", "cpu")
"""Device of the engines. On "cuda" they compute in bfloat16, because SGLang's kernels cannot compute in float32."""
COMMON: dict[str, Any] = {
    "device": DEVICE,
    "dtype": "float32" if DEVICE == "cpu" else "bfloat16",
    "mem_fraction_static": 0.5,
    "port": 0,
    "admin_api_key": "admin-key",
    "max_running_requests": 16,
    "control_timeout": 60.0,
    "log_level": "warning",
    "random_seed": 1,
}
ENGINES: dict[str, dict[str, Any]] = {
    "embedded": COMMON | {"kv_cache_gib": 0.05, "cpu_threads": 1, "cpu_kernel_choice": CPU_KERNELS},
    "vllm": COMMON | {"engine": "vllm", "kv_cache_gib": 1, "engine_args": {"enforce_eager": True}},
    "sglang": COMMON | {"engine": "sglang", "kv_cache_gib": 0.05},
}
"""Settings of each engine. vLLM's cache takes whole GiB on a CPU."""
TOLERANCE = {"embedded": 1e-4, "vllm": 1e-3, "sglang": 1e-3}
if DEVICE == "cuda":
    TOLERANCE = dict.fromkeys(TOLERANCE, 0.15)
REQUESTS: dict[str, dict[str, Any]] = {
    "allowed_token_ids": {"sampling_params": {"allowed_token_ids": [50, 51]}},
    "bad_words": {"sampling_params": {"bad_words": ["a"]}},
    "ignore_eos with a grammar": {"sampling_params": {"regex": "a+", "ignore_eos": True}},
    "return_sampling_mask": {"return_sampling_mask": True, "sampling_params": {"temperature": 1.0, "top_k": 5}},
    "token_ids_logprob": {"token_ids_logprob": [5]},
    "logprobs_mode='raw'": {"sampling_params": {"logprobs_mode": "raw"}},
    "logprobs_mode='sampling'": {"sampling_params": {"logprobs_mode": "sampling", "temperature": 1.0}},
    "logprobs_mode='sampling' at temperature 0": {"sampling_params": {"logprobs_mode": "sampling"}},
}
"""Requests that some engine refuses, by the name in its error."""
_EVERY_OTHER = {"ignore_eos with a grammar", "return_sampling_mask", "token_ids_logprob", "logprobs_mode='raw'"}
REFUSED: dict[str, set[str]] = {
    "embedded": set(),
    "vllm": _EVERY_OTHER | {"logprobs_mode='sampling' at temperature 0"},
    "sglang": _EVERY_OTHER | {"allowed_token_ids", "bad_words", "logprobs_mode='sampling'"},
}
"""Names in `REQUESTS` of what an engine refuses."""
PACKS_WEIGHTS = {"vllm"}
"""Engines whose linear layers have a layout of their own on a CPU, so that no part of one is read or written."""
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
PROMPT = random_prompt(40, seed=1)
RUNNING = 3500
"""Tokens of a request that runs while something happens to it. On a busy CPU a request of seconds is needed."""
LONG_PROMPT = random_prompt(300, seed=2)
"""Has two of vLLM's pages on a CPU, which have 128 tokens."""

Weights = dict[str, torch.Tensor]


class Served:
    def __init__(self, adapter: HttpServerEngineAdapter, engine: str, folders: list[Path]) -> None:
        self.adapter, self.engine, self.folders = adapter, engine, folders
        self.tolerance = TOLERANCE[engine]
        self.checkpoints: list[Weights] = [load_file(folder / "model.safetensors") for folder in folders]
        auto: Any = AutoModelForCausalLM
        self._models = [auto.from_pretrained(folder, dtype=torch.float32).eval() for folder in folders]
        self._labels = itertools.count()
        self._judge = SpanJudge(folders[0], self.tolerance)
        self.serve_first()

    # -- weights -------------------------------------------------------------------------------------------------

    def serve_first(self) -> None:
        """Serve the first checkpoint with an empty cache, without requests or a pause."""
        self.adapter.abort_request(abort_all=True)
        self.adapter.continue_generation()
        self.push(0, mode="abort")

    def push(self, checkpoint: int, mode: Any = "in_place", fate: Fate = "kept") -> str:
        """Push a checkpoint under a new label, and return the label. `fate`: what becomes of the cache."""
        label = f"v{next(self._labels)}"
        # The judge must know the version before the first token has it.
        self._judge.versions[label] = Version(self._models[checkpoint].state_dict(), fate)
        weights = list(self.checkpoints[checkpoint].items())
        self.adapter.update_weights_from_tensor(weights, weight_version=label, mode=mode, partial=False)
        return label

    # -- generation ----------------------------------------------------------------------------------------------

    def generate(self, prompt: Any = PROMPT, *, tokens: int = 8, **fields: Any) -> Any:
        params = GREEDY | {"max_new_tokens": tokens} | fields.pop("sampling_params", {})
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "timeout": 60.0}
        return self.adapter.generate(**(body | fields))

    def begin(
        self, pool: ThreadPoolExecutor, prompt: list[int] = PROMPT, *, tokens: int = RUNNING, **fields: Any
    ) -> Future[Any]:
        """Return a running request that has a token."""
        started = threading.Event()
        request = pool.submit(self._stream, prompt, tokens, started.set, **fields)
        assert started.wait(60), "the request got no token"
        return request

    def _stream(self, prompt: list[int], tokens: int, on_token: Callable[[], None], **fields: Any) -> dict[str, Any]:
        replies: list[dict[str, Any]] = []
        # Each frame has all tokens so far: a frame for each token would keep the CPU from everything else.
        params = {"stream_interval": 50}
        for reply in self.generate(prompt, tokens=tokens, stream=True, sampling_params=params, **fields):
            replies.append(reply)
            on_token()
        return replies[-1]

    # -- judgement -----------------------------------------------------------------------------------------------

    def judge(self, prompt: list[int], reply: dict[str, Any]) -> list[str]:
        """Assert that each token is that of transformers under the versions in the reply. Return the versions."""
        self._judge.check(prompt, reply)
        return [span["version"] for span in reply["meta_info"]["weight_versions"]]

    def model(self, checkpoint: int) -> Any:
        """Return transformers' model of a checkpoint."""
        return self._models[checkpoint]

    @torch.inference_mode()
    def logprobs(self, tokens: list[int], checkpoint: int = 0) -> torch.Tensor:
        """Return transformers' log-probabilities of the token after each position, [len(tokens), vocab]."""
        return self.logits(tokens, checkpoint).log_softmax(-1)

    @torch.inference_mode()
    def logits(self, tokens: list[int], checkpoint: int = 0) -> torch.Tensor:
        """Return transformers' logits, [len(tokens), vocab]."""
        logits: torch.Tensor = self._models[checkpoint](torch.tensor([tokens])).logits[0].float()
        return logits
