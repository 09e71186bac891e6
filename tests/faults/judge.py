"""Checks a server: the checksums of every parameter on every rank, and tokens against those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file

from benchmarks.served_slices import expected_checksums, served_tensors
from tests.parity.harness import Reference
from verl_server.engine.base import EngineBase

Weights = dict[str, torch.Tensor]
PROMPT = [17, 42, 99, 7, 3, 120]
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


def weights_of(model: Path, seed: int) -> Weights:
    """Return the checkpoint after training step `seed`. Step 0 is the checkpoint itself."""
    weights: Weights = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    noise = 0.2 if seed else 0.0
    return {n: w + noise * torch.randn(w.shape, generator=generator) for n, w in sorted(weights.items())}


class Judge:
    def __init__(self, model: Path, tp_size: int) -> None:
        self._served = served_tensors(model, tp_size)
        self._reference = Reference(model)

    def checksums(self, weights: Weights) -> list[dict[str, str]]:
        """Return the checksums by name, for each rank."""
        return expected_checksums(self._served, weights.items(), torch.float32)

    def expect_served(self, engine: EngineBase, weights: Weights, version: str | None = None) -> None:
        """Assert that the server holds exactly these weights and generates with them."""
        assert httpx.get(f"{engine.url}/health", timeout=10).status_code == 200
        served = [rank["checksums"] for rank in engine.weights_checker()["ranks"]]
        for rank, sums in enumerate(self.checksums(weights)):
            wrong = [name for name, checksum in sums.items() if served[rank][name] != checksum]
            assert not wrong, f"rank {rank} serves other weights: {wrong[:4]} ({len(wrong)} in all)"
        result = engine.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True, timeout=20)
        if version is not None:
            assert result["meta_info"]["weight_version"] == version
        self._expect_parity(result, weights)

    def expect_refused(self, engine: EngineBase, why: str) -> None:
        """Assert that the server lives, but refuses to generate and names the reason `why`."""
        assert httpx.get(f"{engine.url}/health", timeout=10).status_code == 200
        answer = httpx.post(f"{engine.url}/generate", json={"input_ids": PROMPT, "sampling_params": GREEDY}, timeout=20)
        assert answer.status_code == 503, answer.text
        assert why in answer.text

    @torch.no_grad()
    def _expect_parity(self, result: dict[str, Any], weights: Weights) -> None:
        self._reference.model.load_state_dict(weights)
        logprobs = self._reference.logprobs(PROMPT + result["output_ids"])[len(PROMPT) - 1 : -1]
        assert logprobs.argmax(-1).tolist() == result["output_ids"]
        ours = torch.tensor([entry[0] for entry in result["meta_info"]["output_token_logprobs"]])
        assert (ours - logprobs.max(-1).values).abs().max() < 1e-4
