"""TRL's `GRPOTrainer` in server mode, unmodified, with this project's server in the place of `vllm serve`.

    python -m benchmarks.peers.trl_grpo --shape 0.6b --steps 8

It needs two GPUs and an environment with trl 1.16 and vllm 0.22 to 0.31 beside this package: TRL's client sends weights
with vLLM's own NCCL code. The trainer has the first GPU and the server the second. The trainer has other random weights
than the server at its start, so TRL's comparison of log-probabilities (`sampling_logp_difference`) is small only if the
server samples from the weights that TRL pushed before each step. Each step prints one JSON line with this comparison,
the reward (the share of output tokens with an even id), and the seconds of the step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.large_tokenizer import large_tokenizer
from benchmarks.options import report
from benchmarks.shapes import SHAPES
from verl_server import HttpServerEngineAdapter
from verl_server.errors import VerlServerError
from verl_server.models.tiny import make_model_folder

_START_SECONDS, _STOP_SECONDS = 120.0, 30.0


def even_share(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return the share of tokens with an even id, for each completion."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def train(args: argparse.Namespace, folder: Path, url: str) -> list[dict[str, Any]]:
    """Train for `args.steps` steps. Return TRL's log of each step."""
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Lines(TrainerCallback):  # type: ignore[misc]
        """Prints a line for each log."""

        def __init__(self) -> None:
            self._last = time.perf_counter()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
            now = time.perf_counter()
            kept = {
                k: v for k, v in (logs or {}).items() if "reward" in k or "sampling" in k or k in ("loss", "num_tokens")
            }
            print(json.dumps({"name": "trl_step", "step": state.global_step, "seconds": now - self._last} | kept))
            self._last = now

    rng = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=4)) for _ in range(512)]
    prompts = [{"prompt": " ".join(rng.choices(words, k=24))} for _ in range(256)]
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=even_share,
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
        callbacks=[Lines()],
        args=GRPOConfig(
            output_dir=str(folder / "out"),
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=url,
            per_device_train_batch_size=args.batch,
            num_generations=8,
            max_completion_length=args.output_len,
            learning_rate=args.learning_rate,
            max_steps=args.steps,
            logging_steps=1,
            bf16=True,
            beta=0.0,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    trainer.train()
    return [log for log in trainer.state.log_history if "reward" in log]


@contextmanager
def serve(folder: Path) -> Iterator[HttpServerEngineAdapter]:
    """Serve the model on the second GPU as `verl-server serve` does: TRL's client sends no key."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--load-format", "dummy", "--device", "cuda", "--dtype", "bfloat16"]
    command = [sys.executable, "-m", "verl_server", "serve", "--model-path", str(folder), "--port", str(port)]
    server = subprocess.Popen([*command, *options], env=os.environ | {"CUDA_VISIBLE_DEVICES": "1"})
    try:
        with attach(f"http://127.0.0.1:{port}", server) as engine:
            yield engine
    finally:
        server.terminate()
        server.wait(_STOP_SECONDS)


def attach(url: str, server: subprocess.Popen[bytes]) -> HttpServerEngineAdapter:
    """Attach to the server as soon as it answers."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            engine = HttpServerEngineAdapter.attach(url)
            engine.get_model_info()  # answered once the model is loaded
            return engine
        except VerlServerError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(1)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("benchmarks.peers.trl_grpo", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--steps", type=int, default=8, help="steps of training (8)")
    parser.add_argument("--batch", type=int, default=32, help="completions in a step (32)")
    parser.add_argument("--output-len", type=int, default=64, help="longest completion in tokens (64)")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    args = parser.parse_args(argv)
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # of this process, before it uses CUDA: TRL refuses a second GPU
    with tempfile.TemporaryDirectory() as temporary:
        shape = SHAPES[args.shape]
        folder = make_model_folder(
            temporary, "qwen3", weights=False, tokenizer=large_tokenizer(shape["vocab_size"]), **shape
        )
        with serve(folder) as server:
            before = server.get_model_info()["weight_version"]
            assert server.url is not None
            logs = train(args, folder, server.url)
            after = server.get_model_info()["weight_version"]
    rewards = [log["reward"] for log in logs]
    report("trl_grpo_reward", rewards[-1], "share", first=rewards[0], rewards=rewards, versions=[before, after])
    assert before != after, "TRL pushed no weights"


if __name__ == "__main__":
    main()
