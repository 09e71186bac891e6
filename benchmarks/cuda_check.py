"""Checks that CI cannot run: parity in bf16, and weight updates through CUDA IPC, on NVIDIA GPUs.

    python -m benchmarks.cuda_check [--arch qwen3 llama ...] [--tp-size 2]

Prints one JSON line per figure (`name, value, unit, limit, ok`). First the release and resume of device memory is
checked (`benchmarks.memory_cycle`). Then, for each architecture, the mean absolute error of bf16 log-probabilities
against fp32, of this server and of transformers over the same sequences. The server computes them one by one, in a
mixed batch, in chunks, and from the prefix cache. Last, this process pushes weights into the server process through
CUDA IPC handles; served parameters and log-probabilities are compared with those of the pushed model. The
`flat_copy_limit` of the updates is the time of plain copies of the bytes that each rank reads, over the same links.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
import tyro
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.copy_limit import measure
from benchmarks.memory_cycle import check_memory_cycle
from benchmarks.served_slices import served_tensors, traffic
from verl_server import HttpServerEngineAdapter
from verl_server.models.tiny import make_model_folder, random_model

SHAPE: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}


@dataclasses.dataclass
class Args:
    """Check parity and weight updates on CUDA."""

    arch: tuple[Literal["llama", "qwen2", "qwen3", "mistral"], ...] = ("llama", "qwen2", "qwen3")
    """Architectures to check."""
    pushes: int = 50
    """Number of timed weight updates."""
    tp_size: int = 1
    """Tensor-parallel ranks, each on its own GPU. This process pushes from the first GPU."""


def report(name: str, value: float, unit: str, limit: float | None = None) -> bool:
    ok = limit is None or value <= limit
    print(json.dumps({"name": name, "value": round(value, 6), "unit": unit, "limit": limit, "ok": ok}), flush=True)
    return ok


def load_reference(folder: Path, dtype: torch.dtype) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.to("cuda").eval()


@torch.inference_mode()
def reference_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """[len(tokens) - 1] fp32: log p(token i + 1 | tokens up to i)."""
    ids = torch.tensor([tokens], device=model.device)
    logits = model(ids).logits[0, :-1].float()
    picked: torch.Tensor = logits.gather(-1, ids[0, 1:, None])[:, 0] - logits.logsumexp(-1)
    return picked.cpu()


def server_logprobs(engine: HttpServerEngineAdapter, sequences: list[list[int]], together: bool) -> list[torch.Tensor]:
    """The server's log-probabilities of `sequences`, which are sent as prompts, one by one or as one batch."""
    settings: dict[str, Any] = {
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    if together:
        results = engine.generate(input_ids=sequences, **settings)
    else:
        results = [engine.generate(input_ids=sequence, **settings) for sequence in sequences]
    return [torch.tensor([lp for lp, *_ in r["meta_info"]["input_token_logprobs"][1:]]) for r in results]


def mean_error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return float(torch.cat(found).sub(torch.cat(expected)).abs().mean())


def check_parity(engine: HttpServerEngineAdapter, folder: Path, arch: str, label: str, tp_size: int) -> bool:
    generator = torch.Generator().manual_seed(7)
    lengths = (33, 129, 700, 1500, 64, 257)
    sequences = [torch.randint(5, SHAPE["vocab_size"], (n,), generator=generator).tolist() for n in lengths]
    errors: dict[str, float] = {}
    exact = load_reference(folder, torch.float32)
    expected = [reference_logprobs(exact, s) for s in sequences]
    del exact
    rounded = load_reference(folder, torch.bfloat16)
    errors["transformers"] = mean_error([reference_logprobs(rounded, s) for s in sequences], expected)
    del rounded
    errors["alone"] = mean_error(server_logprobs(engine, sequences, together=False), expected)
    errors["mixed_batch_chunked"] = mean_error(server_logprobs(engine, sequences, together=True), expected)
    errors["decode"] = decode_error(engine, folder, sequences)
    # A group so large that each rank uses cascade attention for its share of the keys.
    groups = [sequences[3]] * 62 * tp_size + [sequences[2]] * 3
    errors["decode_of_groups"] = decode_error(engine, folder, groups)
    limit = 1.5 * errors["transformers"]
    return all(
        report(f"{arch}_{label}_logprob_error_{name}", value, "nats", None if name == "transformers" else limit)
        for name, value in errors.items()
    )


def decode_error(engine: HttpServerEngineAdapter, folder: Path, sequences: list[list[int]]) -> float:
    """Mean error of the log-probabilities of sampled tokens against fp32. Some prompts are in the prefix cache."""
    results = engine.generate(
        input_ids=sequences,
        sampling_params={"max_new_tokens": 48, "temperature": 1.0, "ignore_eos": True},
        return_logprob=True,
    )
    exact = load_reference(folder, torch.float32)
    found, expected = [], []
    for prompt, result in zip(sequences, results, strict=True):
        found.append(torch.tensor([lp for lp, *_ in result["meta_info"]["output_token_logprobs"]]))
        expected.append(reference_logprobs(exact, prompt + result["output_ids"])[len(prompt) - 1 :])
    assert any(r["meta_info"]["cached_tokens"] for r in results), "nothing came from the prefix cache"
    return mean_error(found, expected)


def check_updates(engine: HttpServerEngineAdapter, folder: Path, arch: str, args: Args) -> bool:
    """Push new weights into the server `args.pushes` times, and check the parity of the last ones."""
    config = AutoConfig.from_pretrained(folder)
    models = [random_model(config, seed=s, dtype=torch.bfloat16, init_std=0.5).cuda() for s in (11, 12)]
    seconds = []
    for push in range(args.pushes):
        named = list(models[push % 2].state_dict().items())
        torch.cuda.synchronize()
        start = time.perf_counter()
        engine.update_weights_from_tensor(named, partial=False)
        seconds.append(time.perf_counter() - start)
    last = models[(args.pushes - 1) % 2]
    for name, rows in ((n, t[:2].float().cpu()) for n, t in last.named_parameters()):
        served = torch.tensor(engine.get_weights_by_name(name, truncate_size=2))
        assert torch.equal(served, rows), f"{name} differs after the update"
    gigabytes = sum(p.nbytes for p in last.parameters()) / 1e9
    elements = dict(traffic(served_tensors(folder, args.tp_size), trainer_ranks=1))
    limit = measure("cuda", elements, torch.bfloat16, torch.bfloat16)
    ok = report(f"{arch}_update_median", 1e3 * statistics.median(seconds[2:]), "ms")
    report(f"{arch}_update_worst", 1e3 * max(seconds[2:]), "ms")
    report(f"{arch}_update_first", 1e3 * seconds[0], "ms")
    report(f"{arch}_update_bytes", gigabytes, "GB")
    report(f"{arch}_flat_copy_limit", limit["all_ms"], "ms")
    with tempfile.TemporaryDirectory() as new:
        last.save_pretrained(new)
        return check_parity(engine, Path(new), arch, "updated", args.tp_size) and ok


def main() -> None:
    args = tyro.cli(Args)
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__, "argv": sys.argv}))
    if not torch.cuda.is_available():
        sys.exit("benchmarks.cuda_check needs an NVIDIA GPU. `make test` checks everything else on the CPU.")
    ok = check_memory_cycle(torch.device("cuda", 0))
    for arch in args.arch:
        with tempfile.TemporaryDirectory() as path:
            folder = make_model_folder(path, arch, dtype=torch.bfloat16, **SHAPE)
            start = time.perf_counter()
            with HttpServerEngineAdapter(
                model_path=str(folder),
                device="cuda",
                port=0,
                tp_size=args.tp_size,
                mem_fraction_static=0.3,
                chunked_prefill_size=1024,
                random_seed=0,
            ) as engine:
                report(f"{arch}_ready", time.perf_counter() - start, "s")
                ok &= check_parity(engine, folder, arch, "loaded", args.tp_size)
                ok &= check_updates(engine, folder, arch, args)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
