"""Trainer and server alternate on one device: release the server's memory, train, push, generate, many times.

    python -m benchmarks.colocated --device cpu --shape tiny --cycles 100
    python -m benchmarks.colocated --device cuda --shape 8b
    python -m benchmarks.colocated --device cuda --shape 8b --trainer-ranks 2 --tp 2 --train-batch 2 1024 --cycles 4
    python -m benchmarks.colocated --device cuda --shape 0.6b --engine vllm --cycles 10
    python -m benchmarks.colocated --device cuda --shape 8b --engine sglang --cycles 10

One cycle: release weights and KV cache, take a training step, resume the weights, push, resume the KV cache, generate.
With `--offload`, the trainer's weights are in host memory while the server generates. Each cycle checks four
conditions: the released memory is free (by the server's resident bytes on the CPU, by the used bytes of the device on
CUDA), the checksum of every served parameter equals the trainer's, the server refuses to generate with 503 between
resuming and pushing, and on the CPU (float32) the greedy tokens are those of the trainer's own model. Any other result
ends the run with an error. Prints one JSON line per figure; progress goes to stderr.

With several `--trainer-ranks` the model is sharded (FSDP2), one process and one GPU for each rank. The server's ranks
are on the same GPUs. Two figures have a `limit` of this run in milliseconds: `colocated_push` that of plain flat copies
of the same bytes over the same links, and `colocated_train` that of the step's arithmetic, at the rate of a large
matrix product on all of the trainer's GPUs together (on the CPU: of the machine).
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from transformers import AutoConfig

from benchmarks.copy_limit import better
from benchmarks.copy_limit import measure as measure_copies
from benchmarks.engines import ENGINES, settings_of_engine
from benchmarks.footprint import device_used_bytes, footprint
from benchmarks.processes import process_tree
from benchmarks.served_slices import ServedTensor, expected_checksums, tensors_of_engine, traffic
from benchmarks.shapes import SHAPES, shape_folder
from benchmarks.trainer_ranks import process_group
from benchmarks.workload import measure_ceilings, training_flop
from verl_server import HttpServerEngineAdapter, VerlEngine, __version__
from verl_server.errors import ServerUnavailableError
from verl_server.models.tiny import random_model

_PROMPT = [9, 8, 7, 6, 5]
_TOKENS = 16
_MEASURED = "measured.json"
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
        batch: tuple[int, int] = (2, 64),
    ) -> None:
        """`batch`: (sequences, tokens of each) that a rank trains on in a cycle."""
        self.milliseconds: dict[str, list[float]] = defaultdict(list)
        self.serving_bytes: list[int] = []
        self.released_bytes: list[int] = []
        self._engine, self._model, self._device, self._served = engine, model, device, served
        self._offload = offload
        self._tags = ["kv_cache", "weights"] if keep_graphs else None
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self._batch = batch
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._generator = torch.Generator().manual_seed(self._rank)

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
        if self._rank != 0:  # rank 0 has the server, and counts the memory of all its ranks
            return 0
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
        """Bytes of weights and KV cache that one rank of the server reports. On the CPU only the weights count, because
        unused KV pages have no memory yet, and on the trainer's first rank only (`resident_bytes`)."""
        memory = self._engine.get_server_info()["internal_states"][0].get("memory", {})
        if "weight_bytes" not in memory:  # another engine may not report it; it holds the weights at least
            return sum(p.nbytes for p in self._model.parameters())
        if self._device.type == "cuda":
            return int(memory["weight_bytes"] + memory["kv_cache_bytes"])
        return int(memory["weight_bytes"]) if self._rank == 0 else 0

    def _train(self) -> None:
        vocab = self._model.config.vocab_size
        ids = torch.randint(5, vocab, self._batch, generator=self._generator).to(self._device)
        self._model(input_ids=ids, labels=ids).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()  # else the allocator keeps the activations, and the server cannot resume

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
        ranks = [rank["checksums"] for rank in self._engine.weights_checker()["ranks"]]
        expected: list[dict[str, str]] = []
        if self._rank == 0:
            expected = expected_checksums(self._served, self._full_tensors(), next(self._model.parameters()).dtype)
        else:
            for _ in self._full_tensors():
                pass
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

    def _full_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The full parameters, which all ranks gather one by one."""
        for name, parameter in self._model.named_parameters():
            full = parameter.detach()
            yield name, full.full_tensor() if isinstance(full, DTensor) else full

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.milliseconds[phase].append(1e3 * (time.perf_counter() - start))


@dataclass(frozen=True)
class Measured:
    """Measurements of the trainer's first rank."""

    milliseconds: dict[str, list[float]]
    """Phase -> its times."""
    serving_bytes: list[int]
    released_bytes: list[int]
    train_limit: float
    """Milliseconds of the arithmetic of a training step."""


def benchmark(args: argparse.Namespace, folder: Path, command: str) -> None:
    served, dtype = tensors_of_engine(args.engine, folder, args.tp), _dtype(args)
    elements = dict(traffic(served, args.trainer_ranks))
    before = measure_copies(args.device, elements, dtype, dtype)
    if args.trainer_ranks == 1:
        run_rank(0, args, folder)
    else:
        spawn(run_rank, (args, folder), nprocs=args.trainer_ranks)  # type: ignore[no-untyped-call]
    measured = Measured(**json.loads((folder / _MEASURED).read_text()))
    copies = better(before, measure_copies(args.device, elements, dtype, dtype))
    report(measured, copies["all_ms"], args.cycles, command)


def run_rank(rank: int, args: argparse.Namespace, folder: Path) -> None:
    """Be one rank of the trainer. The first rank writes what it measured to `folder`."""
    ranks = args.trainer_ranks
    device = torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif ranks > 1:
        torch.set_num_threads(1)  # several threads would wait for each other on cores that others use
    with process_group(rank, ranks, folder, device.type):
        run_cycles(rank, args, folder, device)


def run_cycles(rank: int, args: argparse.Namespace, folder: Path, device: torch.device) -> None:
    """Run the cycles in the process group of all ranks."""
    ranks, host = args.trainer_ranks, dist.new_group(backend="gloo")
    train_limit = train_limit_ms(args, host)
    model = make_model(args, folder, device)
    settings: dict[str, Any] = {
        "model_path": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "device": args.device,
        "dtype": str(_dtype(args)).removeprefix("torch."),
        "mem_fraction_static": args.mem_fraction_static,
        "tp_size": args.tp,
        "log_level": "warning",
    } | settings_of_engine(args.engine, kv_cache_gib=0.5)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    with VerlEngine(mesh, launch_server=True, **settings) as engine:
        engine.update_weights_from_tensor(model.named_parameters(), partial=False)
        served, batch = tensors_of_engine(args.engine, folder, args.tp), tuple(args.train_batch)
        options = {"offload": args.offload, "keep_graphs": args.keep_graphs, "batch": batch}
        cycle = Cycle(engine, model, device, served, **options)
        for number in range(args.cycles):
            dist.barrier(host)
            cycle.run()
            if rank == 0 and (number + 1) % 10 == 0:
                print(f"{number + 1} of {args.cycles} cycles", file=sys.stderr, flush=True)
    if rank == 0:
        times = dict(cycle.milliseconds)
        measured = Measured(times, cycle.serving_bytes, cycle.released_bytes, train_limit)
        (folder / _MEASURED).write_text(json.dumps(asdict(measured)))
    dist.barrier(host)


def train_limit_ms(args: argparse.Namespace, host: dist.ProcessGroup) -> float:
    """Milliseconds of the arithmetic of a training step of all ranks, on all GPUs of the ranks or on the CPU."""
    rows, length = args.train_batch
    flop = args.trainer_ranks * training_flop(SHAPES[args.shape], [(length, length)] * rows, recompute=False)
    rate = torch.tensor([float("inf")], dtype=torch.float64)
    if args.device == "cuda" or dist.get_rank() == 0:
        rate[0] = measure_ceilings(args.device, None).flop_per_s
    dist.all_reduce(rate, dist.ReduceOp.MIN, host)  # all ranks wait for the slowest GPU
    machine = rate.item() * (args.trainer_ranks if args.device == "cuda" else 1)
    return float(1e3 * flop / machine)


def make_model(args: argparse.Namespace, folder: Path, device: torch.device) -> Any:
    """The trainer's model with random weights; with several ranks, this rank's shards."""
    config, dtype = AutoConfig.from_pretrained(folder), _dtype(args)
    # On the CPU the weights are large enough that rounding does not decide greedy tokens. On a GPU the model is created
    # on the device, which is faster for the largest shape.
    torch.manual_seed(0)
    with device:
        model = random_model(config, dtype=dtype) if device.type == "cpu" else _fast_random_model(config, dtype)
    if args.trainer_ranks > 1:
        mesh = init_device_mesh(device.type, (args.trainer_ranks,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        # Otherwise the root would stay gathered after the forward pass that checks tokens.
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the server measures the free memory when it starts
    return model


def _dtype(args: argparse.Namespace) -> torch.dtype:
    return torch.bfloat16 if args.device == "cuda" else torch.float32


def _fast_random_model(config: Any, dtype: torch.dtype) -> Any:
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def report(measured: Measured, copy_ms: float, cycles: int, command: str) -> None:
    versions = {"verl_server": __version__, "torch": torch.__version__, "python": platform.python_version()}
    run = {"cycles": cycles, "command": command, "versions": versions}
    limits = {"push": copy_ms, "train": measured.train_limit}
    for phase, times in measured.milliseconds.items():
        figure = {"name": f"colocated_{phase}", "value": round(statistics.median(times), 3), "unit": "ms"}
        limit = {"limit": round(limits[phase], 3)} if phase in limits else {}
        print(json.dumps(figure | limit | {"worst_ms": round(max(times), 3)} | run), flush=True)
    freed = [a - b for a, b in zip(measured.serving_bytes, measured.released_bytes, strict=True)]
    for name, values in (
        ("serving", measured.serving_bytes),
        ("released", measured.released_bytes),
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
    parser.add_argument("--engine", choices=list(ENGINES), default="embedded", help="engine (embedded)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of the server (1)")
    parser.add_argument("--trainer-ranks", type=int, default=1, help="trainer processes; two or more use FSDP2 (1)")
    parser.add_argument(
        "--train-batch",
        type=int,
        nargs=2,
        default=[2, 64],
        metavar=("SEQUENCES", "TOKENS"),
        help="sequences that each trainer rank trains on in a cycle, and the tokens of each (2 64)",
    )
    parser.add_argument(
        "--keep-graphs", action="store_true", help="release weights and KV cache, but keep captured CUDA graphs"
    )
    args = parser.parse_args(argv)
    if args.device == "cpu" and args.offload:
        parser.error("--offload moves weights from a GPU to the host: it needs --device cuda.")
    if args.device == "cpu" and args.shape == "8b":
        parser.error("--shape 8b needs a GPU: on the CPU, trainer and server would need 33 GB each. Use --shape 0.6b.")
    if args.device == "cpu" and not ENGINES[args.engine].releases_on_cpu:
        parser.error(f"--engine {args.engine} needs --device cuda: it releases no memory on the CPU.")
    if args.trainer_ranks > 1 and args.offload:
        parser.error("--offload needs --trainer-ranks 1: shards are not moved here.")
    gpus = max(args.tp, args.trainer_ranks)
    if args.device == "cuda" and torch.cuda.device_count() < gpus:
        parser.error(f"--device cuda needs {gpus} NVIDIA GPUs here, but torch sees {torch.cuda.device_count()}.")
    return args


def main(argv: list[str] | None = None) -> None:
    given = sys.argv[1:] if argv is None else argv
    args = parse_args(given)
    with tempfile.TemporaryDirectory(prefix="verl-colocated-") as temporary:
        folder = shape_folder(temporary, args.shape)
        benchmark(args, folder, "python -m benchmarks.colocated " + " ".join(given))


if __name__ == "__main__":
    main()
