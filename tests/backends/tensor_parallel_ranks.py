"""A trainer of two FSDP2 ranks that pushes to an engine of two tensor-parallel ranks, run under torchrun.

    torchrun --nproc-per-node 2 -m tests.backends.tensor_parallel_ranks ENGINE MODEL_FOLDER RESULT_FOLDER

Each rank writes RESULT_FOLDER/RANK.json: for each version the label, the tokens that the server generated, and the
largest difference of their log-probabilities to those of the trainer's weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from tests.backends.served import ENGINES, GREEDY, PROMPT
from verl_server import VerlEngine

UPDATES = 3


def main(engine: str, folder: str, results: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32)
    reference = auto.from_pretrained(folder, dtype=torch.float32).eval()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh)
    found = []
    tp_mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    with VerlEngine(tp_mesh, model_path=folder, launch_server=True, **_settings(engine)) as served:
        served.register_weights(model)
        for update in range(UPDATES + 1):
            if update:
                _train(model, update)
                served.push_weights(f"v{update}", partial=False)
            found.append(_compare(served, model, reference))
    (results / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _settings(engine: str) -> dict[str, Any]:
    return {name: value for name, value in ENGINES[engine].items() if name != "port"} | {"tp_size": 2}


@torch.no_grad()
def _train(model: Any, seed: int) -> None:
    """Change the shards, differently on each rank."""
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    for parameter in model.parameters():
        shard = parameter.to_local()
        shard.add_(0.02 * torch.randn(shard.shape, generator=generator))


@torch.no_grad()
def _compare(served: Any, model: Any, reference: Any) -> dict[str, Any]:
    reference.load_state_dict({name: tensor.full_tensor() for name, tensor in model.state_dict().items()})
    result = served.generate(
        input_ids=PROMPT, sampling_params=GREEDY | {"max_new_tokens": 8}, return_logprob=True, timeout=60.0
    )
    ids = result["output_ids"]
    rows = reference(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    theirs = torch.tensor([value for value, _, _ in result["meta_info"]["output_token_logprobs"]])
    return {
        "version": result["meta_info"]["weight_version"],
        "tokens": ids,
        "expected": rows.argmax(-1).tolist(),
        "difference": float((rows.max(-1).values - theirs).abs().max()),
    }


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
