"""Trainer and server alternate on one device: release the server's memory, train, push, generate, many times.

    python -m benchmarks.colocated --device cpu --shape tiny --cycles 100
    python -m benchmarks.colocated --device cuda --shape 8b

One cycle: release weights and KV cache, take a training step, resume the weights, push, resume the KV cache, generate.
With `--offload`, the trainer's weights are in host memory while the server generates. Each cycle checks four
conditions: the released memory is free (by the server's resident bytes on the CPU, by the used bytes of the device on
CUDA), the checksum of every served parameter equals the trainer's, the server refuses to generate with 503 between
resuming and pushing, and on the CPU (float32) the greedy tokens are those of the trainer's own model. Any other result
ends the run with an error. Prints one JSON line per figure; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig

from benchmarks.footprint import device_used_bytes, footprint, process_tree
from benchmarks.served_slices import ServedTensor, expected_checksums, served_tensors
from benchmarks.shapes import SHAPES, shape_folder
from verl_server import HttpServerEngineAdapter, VerlEngine, __version__
from verl_server.errors import ServerUnavailableError
from verl_server.models.tiny import random_model

_PROMPT = [9, 8, 7, 6, 5]
_TOKENS = 16
_FREED = 0.95
"""A release must free at least this share of the bytes that the server reports."""


class Cycle:
    """A trainer, its server, and the measurements so far. `run` executes one cycle."""

    def __init__(
        self,
        engine: VerlEngine,
        model: Any,
        device: torch.device,
        served: list[ServedTensor],
        *,
        offload: bool = False,
        keep_graphs: bool = False,
    ) -> None:
        self.milliseconds: dict[str, list[float]] = defaultdict(list)
        self.serving_bytes: list[int] = []
        self.released_bytes: list[int] = []
        self._engine, self._model, self._device, self._served = engine, model, device, served
        self._offload = offload
        self._tags = ["kv_cache", "weights"] if keep_graphs else None
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self._generator = torch.Generator().manual_seed(0)

    def run(self) -> None:
        engine = self._engine
        held, serving = self._held_bytes(), self.resident_bytes()
        with self._timed("release"):
            engine.release_memory_occupation(self._tags)
        released = self.resident_bytes()
        self.serving_bytes.append(serving)
        self.released_bytes.append(released)
        if serving - released < _FREED * held:
            raise AssertionError(
                f"Released memory is not free: the server reported that it held {held:,} bytes, "
                f"but only {serving - released:,} of {serving:,} bytes were freed."
            )
        with self._timed("train"):
            self._train()
        with self._timed("resume_weights"):
            engine.resume_memory_occupation(["weights"])
        self._expect_refusal()
        with self._timed("push"):
            engine.update_weights_from_tensor(self._model.named_parameters(), partial=False)
        if self._offload:
            self._move_model("cpu")
        with self._timed("resume_kv_cache"):
            engine.resume_memory_occupation()
        with self._timed("generate"):
            tokens = self._generate()
        self._expect_parity(tokens)
        if self._offload:
            self._move_model(self._device)

    def resident_bytes(self) -> int:
        """Return the private resident bytes of the server on the CPU, or the used bytes of the device, without torch's
        cache, on CUDA."""
        if self._device.type == "cuda":
            return device_used_bytes(self._device)
        assert isinstance(self._engine.engine, HttpServerEngineAdapter) and self._engine.engine.pid is not None
        return footprint(process_tree(self._engine.engine.pid))["private_bytes"]

    def _move_model(self, to: torch.device | str) -> None:
        """Move the model between GPU and host, as a trainer does to free GPU memory, and check that it is free."""
        before, size = self.resident_bytes(), sum(p.nbytes for p in self._model.parameters())
        with self._timed("offload" if to == "cpu" else "onload"):
            self._engine.unregister_weights()  # freeing memory while the server maps it is undefined behaviour
            self._model.to(to)
        freed = before - self.resident_bytes()
        if to == "cpu" and freed < _FREED * size:
            raise AssertionError(
                f"The trainer offloaded {size:,} bytes, but only {freed:,} bytes of the GPU were freed: the server may "
                "still map the rest."
            )

    def _held_bytes(self) -> int:
        """Bytes of weights and KV cache that the server reports. On the CPU only the weights count, because unused KV
        pages have no memory yet."""
        memory = self._engine.get_server_info()["internal_states"][0]["memory"]
        return int(memory["weight_bytes"] + (memory["kv_cache_bytes"] if self._device.type == "cuda" else 0))

    def _train(self) -> None:
        vocab = self._model.config.vocab_size
        ids = torch.randint(5, vocab, (2, 64), generator=self._generator).to(self._device)
        self._model(input_ids=ids, labels=ids).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _generate(self) -> list[int]:
        sampling = {"temperature": 0, "max_new_tokens": _TOKENS, "ignore_eos": True}
        tokens: list[int] = self._engine.generate(input_ids=_PROMPT, sampling_params=sampling)["output_ids"]
        return tokens

    def _expect_refusal(self) -> None:
        try:
            self._generate()
        except ServerUnavailableError:
            return
        raise AssertionError("The server generated with weights that were resumed, but not pushed.")

    def _expect_parity(self, tokens: list[int]) -> None:
        parameters = [(name, parameter.detach()) for name, parameter in self._model.named_parameters()]
        expected = expected_checksums(self._served, parameters, parameters[0][1].dtype)
        ranks = [rank["checksums"] for rank in self._engine.weights_checker()["ranks"]]
        wrong = [f"{n} on rank {i}" for i, sums in enumerate(expected) for n, own in sums.items() if ranks[i][n] != own]
        if wrong:
            raise AssertionError(f"Served weights differ from the trainer's: {wrong[:4]}")
        if self._device.type == "cpu":
            with torch.no_grad():
                logits = self._model(torch.tensor([_PROMPT + tokens])).logits[0, len(_PROMPT) - 1 : -1]
            if logits.argmax(-1).tolist() != tokens:
                raise AssertionError(
                    f"The server generated {tokens}, but the trainer's model predicts {logits.argmax(-1).tolist()}."
                )

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.milliseconds[phase].append(1e3 * (time.perf_counter() - start))


def benchmark(args: argparse.Namespace, folder: Path, command: str) -> None:
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1)
    # On the CPU the weights are large enough that rounding does not decide greedy tokens. On a GPU the model is created
    # on the device, which is faster for the largest shape.
    config = AutoConfig.from_pretrained(folder)
    with device:
        model = random_model(config, dtype=dtype) if device.type == "cpu" else _fast_random_model(config, dtype)
    settings: dict[str, Any] = {
        "model_path": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "device": args.device,
        "dtype": str(dtype).removeprefix("torch."),
        "mem_fraction_static": args.mem_fraction_static,
        "kv_cache_gib": 0.5,
        "tp_size": args.tp,
        "log_level": "warning",
    }
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    with VerlEngine(mesh, launch_server=True, **settings) as engine:
        engine.update_weights_from_tensor(model.named_parameters(), partial=False)
        served = served_tensors(folder, args.tp)
        cycle = Cycle(engine, model, device, served, offload=args.offload, keep_graphs=args.keep_graphs)
        for number in range(args.cycles):
            cycle.run()
            if (number + 1) % 10 == 0:
                print(f"{number + 1} of {args.cycles} cycles", file=sys.stderr, flush=True)
        report(cycle, args.cycles, command)
    dist.destroy_process_group()


def _fast_random_model(config: Any, dtype: torch.dtype) -> Any:
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def report(cycle: Cycle, cycles: int, command: str) -> None:
    versions = {"verl_server": __version__, "torch": torch.__version__, "python": platform.python_version()}
    run = {"cycles": cycles, "command": command, "versions": versions}
    for phase, times in cycle.milliseconds.items():
        figure = {"name": f"colocated_{phase}", "value": round(statistics.median(times), 3), "unit": "ms"}
        print(json.dumps(figure | {"worst_ms": round(max(times), 3)} | run), flush=True)
    freed = [a - b for a, b in zip(cycle.serving_bytes, cycle.released_bytes, strict=True)]
    for name, values in (
        ("serving", cycle.serving_bytes),
        ("released", cycle.released_bytes),
        ("freed", freed),
    ):
        figure = {"name": f"colocated_{name}_bytes", "value": int(statistics.median(values)), "unit": "bytes"}
        print(json.dumps(figure | {"first": values[0], "last": values[-1]} | run), flush=True)


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.colocated", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="device of trainer and server (cpu)")
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny", help="shape of the model (tiny)")
    parser.add_argument("--cycles", type=int, default=100, help="number of cycles (100)")
    parser.add_argument(
        "--mem-fraction-static",
        type=float,
        default=0.5,
        help="share of GPU memory for served weights and KV cache (0.5)",
    )
    parser.add_argument(
        "--offload", action="store_true", help="move the trainer's weights to the host while the server generates"
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of the server (1)")
    parser.add_argument(
        "--keep-graphs", action="store_true", help="release weights and KV cache, but keep captured CUDA graphs"
    )
    args = parser.parse_args(argv)
    if args.device == "cpu" and args.offload:
        parser.error("--offload moves weights from a GPU to the host: it needs --device cuda.")
    if args.device == "cpu" and args.shape == "8b":
        parser.error("--shape 8b needs a GPU: on the CPU, trainer and server would need 33 GB each. Use --shape 0.6b.")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs an NVIDIA GPU, but torch sees none.")
    return args


def main(argv: list[str] | None = None) -> None:
    given = sys.argv[1:] if argv is None else argv
    args = parse_args(given)
    with tempfile.TemporaryDirectory(prefix="verl-colocated-") as temporary:
        folder = shape_folder(temporary, args.shape)
        benchmark(args, folder, "python -m benchmarks.colocated " + " ".join(given))


if __name__ == "__main__":
    main()
