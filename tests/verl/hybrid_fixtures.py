"""Two FSDP2 ranks of verl's hybrid worker, with the replicas that share their (imaginary) GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from conftest import PROMPT, run
from hybrid_worker import HybridWorker
from omegaconf import OmegaConf, open_dict
from ray.util import remove_placement_group
from transformers import AutoModelForCausalLM
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.rollout.llm_server import LLMServerManager

_ACTOR = {
    "strategy": "fsdp2",
    "ppo_mini_batch_size": 4,
    "ppo_micro_batch_size_per_gpu": 4,
    "use_kl_loss": False,
    "use_torch_compile": False,
}


class Hybrid:
    """The trainer's ranks, the replicas, and the checks on what they serve."""

    def __init__(self, make_config: Callable[..., Any], model: Path, tp_size: int, *, offload: bool) -> None:
        self.offloads = offload
        config = make_config(tensor_model_parallel_size=tp_size, log_prob_micro_batch_size_per_gpu=4)
        with open_dict(config):
            actor = config.actor_rollout_ref.actor
            for name, value in (_ACTOR | {"fsdp_config.param_offload": offload}).items():
                OmegaConf.update(actor, name, value, force_add=True)
            config.actor_rollout_ref.model.use_remove_padding = False
            config.actor_rollout_ref.model.enable_gradient_checkpointing = False
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
        self._pool = RayResourcePool(process_on_nodes=[2], use_gpu=True, max_colocate_count=3)
        worker = RayClassWithInitArgs(ray.remote(HybridWorker), config=config.actor_rollout_ref, role="actor_rollout")
        self.workers = RayWorkerGroup(resource_pool=self._pool, ray_cls_with_init=worker, device_name="cpu")
        self.workers.init_model()
        self.manager = LLMServerManager.create(config=config, worker_group=self.workers)
        self.servers = self.manager.server_handles

    def end(self) -> None:
        for actor in [*self.servers, *self.workers.workers]:
            ray.kill(actor)
        for group in self._pool.get_placement_groups():
            remove_placement_group(group)

    def sleep(self) -> None:
        for replica in self.manager.rollout_replicas:
            run(replica.sleep())

    def update(self, steps: int | None) -> None:
        """verl's own update of hybrid replicas: resume, push, offload, resume."""
        ray.get(self.workers.update_weights(global_steps=steps, mode="naive"), timeout=120)

    def push(self, kind: str, steps: int | None, **options: Any) -> list[Exception | None]:
        """Push on all ranks. Return each rank's error."""
        outcomes: list[Exception | None] = []
        for reply in self.workers.push(kind, steps, **options):
            try:
                ray.get(reply, timeout=60)
                outcomes.append(None)
            except Exception as error:
                outcomes.append(error)
        return outcomes

    def generate(self) -> list[Any]:
        """Return an output of each replica."""
        sample = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True, "max_tokens": 8}
        calls = [
            server.generate.remote(prompt_ids=PROMPT, sampling_params=sample, request_id=f"request-{i}")
            for i, server in enumerate(self.servers)
        ]
        outputs: list[Any] = ray.get(calls, timeout=60)
        return outputs

    def expect_parity(self, steps: int | None) -> None:
        """Check that all replicas serve the trainer's weights: log-probabilities within 1e-4 of transformers."""
        everyone = self.workers.full_weights()
        weights = {name: torch.from_numpy(value).double() for name, value in everyone[0].items()}
        self._model.load_state_dict(weights)
        for output in self.generate():
            ids = torch.tensor([PROMPT + output.token_ids])
            with torch.no_grad():
                logprobs = self._model(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
            exact = logprobs.gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
            error = (exact - torch.tensor(output.log_probs)).abs().max().item()
            assert error < 1e-4, f"log-probabilities differ by {error:.1e}"
            assert output.extra_fields["global_steps"] == steps
