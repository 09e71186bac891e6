"""Runs of verl's own trainer, `python -m verl.trainer.main_ppo`, on generated data with random weights.

`verl_step` and `tests/verl` call it in an environment that has verl. The trainer runs in a process of its own; its
figures are read from the file that verl's logger "file" writes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Variant = Literal["gathered", "shards", "offload", "separate", "separate-group"]
VARIANTS: tuple[Variant, ...] = ("gathered", "shards", "offload", "separate", "separate-group")
Rollout = Literal["verl_server", "vllm", "sglang"]

ROOT = Path(__file__).resolve().parents[1]
_TEMPLATE_TOKENS = 24
"""Tokens that the chat template of `models/tiny.py` adds to a prompt, and a few to spare."""
_KILL_SECONDS = 20.0


@dataclass(frozen=True)
class Workload:
    """The number of training steps, and the sizes of each step."""

    prompts: int
    samples: int
    """Answers to each prompt."""
    prompt_tokens: int
    response_tokens: int
    steps: int
    micro_batch: int = 4
    """Sequences that a rank trains on at once."""


@dataclass(frozen=True)
class VerlRun:
    """One run of verl's trainer with GRPO."""

    model: Path
    """Folder with config, weights and tokenizer."""
    work: Path
    """Folder for data, logs and Ray's sockets; its path must be short."""
    load: Workload
    device: Literal["cpu", "cuda"] = "cpu"
    rollout: Rollout = "verl_server"
    variant: Variant = "shards"
    trainer_gpus: int = 1
    rollout_gpus: int = 1
    """GPUs of the replicas in the separate variants."""
    tp: int = 1
    memory: float = 0.5
    """Share of the GPU for the rollout server."""
    server: dict[str, Any] = field(default_factory=dict)
    """Settings of `ServerArgs` that verl has no name for."""
    overrides: tuple[str, ...] = ()
    """Further overrides for Hydra. They come last."""
    has_spans: bool = False
    """Record the parts of each update in `spans`."""

    @property
    def log(self) -> Path:
        """Output of the trainer and, through Ray, of its workers."""
        return self.work / "verl.log"

    @property
    def spans(self) -> Path:
        """Parts of the updates, in JSON lines (`verl_spans`)."""
        return self.work / "spans.jsonl"

    @property
    def is_separate(self) -> bool:
        return self.variant.startswith("separate")

    def command(self) -> list[str]:
        """Return the trainer's command, which also documents the run."""
        return [sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo", *self._overrides(), *self.overrides]

    def environment(self) -> dict[str, str]:
        """Return the variables that verl's processes need. A local Ray inherits them."""
        paths, modules = [str(ROOT)], []
        own = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "RAY_USAGE_STATS_ENABLED": "0"}
        own["VERL_FILE_LOGGER_PATH"] = str(self.work / "metrics.jsonl")
        if self.is_separate:
            own["VERL_LOGGING_LEVEL"] = "WARN"  # verl 0.9.1 logs hybrid_engine=False with an argument that it lacks
        if self.device == "cpu":
            paths.append(str(ROOT / "tests/verl"))
            modules.append("cpu_platform")
            own |= {"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}
        if self.rollout == "verl_server":
            modules.append("verl_server.integrations.verl")
        if self.rollout == "verl_server" and self.variant != "gathered":
            own["VERL_ENGINE_VENDOR"] = "verl_server"
        elif self.device == "cpu":
            own["VERL_ENGINE_DEVICE"] = "cuda"  # verl has no FSDP engine for the CPU
        if self.has_spans:
            modules.append("benchmarks.verl_spans")
            num_bytes = sum(file.stat().st_size for file in self.model.glob("*.safetensors"))
            of_rank = num_bytes // 2 // self.tp  # parameters that one rank of a server holds
            own |= {"VERL_SPANS": str(self.spans), "VERL_SPANS_PARAMETERS": str(of_rank)}
        own["VERL_USE_EXTERNAL_MODULES"] = ",".join(modules)
        own["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
        return {**os.environ, **own}

    def steps(self, timeout: float) -> list[dict[str, float]]:
        """Run the trainer, and return the figures of each training step.

        Raises RuntimeError with the end of the log if the trainer fails or takes longer than `timeout` seconds.
        """
        self._write_data()
        with self.log.open("w") as log, _running(self.command(), self.environment(), self.work, log) as process:
            try:
                code: int | str = process.wait(timeout)
            except subprocess.TimeoutExpired:
                code = f"no end after {timeout:g} s"
        steps = self.finished_steps()
        if code != 0 or len(steps) < self.load.steps:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])
            raise RuntimeError(f"verl's trainer ended with {code} after {len(steps)} steps. Its log ends:\n{tail}")
        return steps

    def finished_steps(self) -> list[dict[str, float]]:
        """Return the figures of the steps so far, also after an error."""
        metrics = self.work / "metrics.jsonl"
        lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        return [line["data"] for line in lines if "timing_s/step" in line["data"]]

    # -- inside ------------------------------------------------------------------------------------------------

    def _write_data(self) -> None:
        content = "x" * (self.load.prompt_tokens - _TEMPLATE_TOKENS)
        with (self.work / "train.jsonl").open("w") as file:
            for index in range(self.load.prompts * self.load.steps * 2):
                text = f"{index} {content}"[: len(content)]
                row: dict[str, Any] = {
                    "data_source": "generated",
                    "prompt": [{"role": "user", "content": text}],
                    "ability": "none",
                }
                row |= {"reward_model": {"style": "rule", "ground_truth": ""}, "extra_info": {"index": index}}
                file.write(json.dumps(row) + "\n")

    def _overrides(self) -> list[str]:
        load, data = self.load, self.work / "train.jsonl"
        settings: dict[str, Any] = {
            "algorithm.adv_estimator": "grpo",
            "data.train_files": data,
            "data.val_files": data,
            "data.train_batch_size": load.prompts,
            "data.max_prompt_length": load.prompt_tokens,
            "data.max_response_length": load.response_tokens,
            "data.dataloader_num_workers": 0,
            "reward.custom_reward_function.path": ROOT / "benchmarks/verl_reward.py",
            "trainer.device": self.device,
            "trainer.nnodes": 1,
            "trainer.n_gpus_per_node": self.trainer_gpus,
            "trainer.total_training_steps": load.steps,
            "trainer.logger": "[console,file]",
            "trainer.val_before_train": False,
            "trainer.test_freq": -1,
            "trainer.save_freq": -1,
            "trainer.default_local_dir": self.work / "checkpoints",
            "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
            "+ray_kwargs.ray_init.include_dashboard": False,
            "+ray_kwargs.ray_init._temp_dir": self.work / "ray",
        }
        settings |= self._model_settings() | self._rollout_settings()
        if self.is_separate:
            settings |= self._separate_settings()
        if self.device == "cpu":
            gpus = self.trainer_gpus + (self.rollout_gpus if self.is_separate else 0)
            settings |= {"ray_kwargs.ray_init.num_cpus": 16, "+ray_kwargs.ray_init.num_gpus": gpus}
            settings["+ray_kwargs.ray_init.object_store_memory"] = 200 << 20
            # Each process of verl takes seconds to start.
            settings |= {"reward.num_workers": 1, "actor_rollout_ref.rollout.agent.num_workers": 1}
        return [f"{name}={value}" for name, value in settings.items()]

    def _model_settings(self) -> dict[str, Any]:
        load, role = self.load, "actor_rollout_ref"
        return {
            f"{role}.model.path": self.model,
            f"{role}.model.use_remove_padding": False,  # True needs flash_attn
            f"+{role}.model.override_config.attn_implementation": "sdpa",
            f"{role}.model.enable_gradient_checkpointing": self.device == "cuda",
            f"{role}.actor.strategy": "fsdp2",
            f"{role}.actor.ppo_mini_batch_size": load.prompts,
            f"{role}.actor.ppo_micro_batch_size_per_gpu": load.micro_batch,
            f"{role}.actor.use_kl_loss": False,
            f"{role}.actor.use_torch_compile": False,
            f"{role}.actor.fsdp_config.param_offload": self.variant == "offload",
            f"{role}.actor.fsdp_config.optimizer_offload": self.variant == "offload",
            f"{role}.rollout.log_prob_micro_batch_size_per_gpu": load.micro_batch,
        }

    def _rollout_settings(self) -> dict[str, Any]:
        load, rollout = self.load, "actor_rollout_ref.rollout"
        settings: dict[str, Any] = {
            f"{rollout}.name": self.rollout,
            f"{rollout}.n": load.samples,
            f"{rollout}.tensor_model_parallel_size": self.tp,
            f"{rollout}.gpu_memory_utilization": self.memory,
            f"{rollout}.max_model_len": load.prompt_tokens + load.response_tokens,
            f"{rollout}.ignore_eos": True,  # equal lengths in every run
            f"{rollout}.calculate_log_probs": True,
        }
        if self.device == "cpu":  # both in float32, so that log-probabilities can be compared
            precision = "++actor_rollout_ref.actor.fsdp_config.mixed_precision"
            settings |= {f"{rollout}.dtype": "float32"}
            settings |= {f"{precision}.{kind}_dtype": "fp32" for kind in ("param", "reduce", "buffer")}
        if self.rollout == "verl_server":
            settings |= {f"+{rollout}.engine_kwargs.verl_server.{key}": value for key, value in self.server.items()}
        return settings

    def _separate_settings(self) -> dict[str, Any]:
        rollout = "actor_rollout_ref.rollout"
        settings: dict[str, Any] = {
            "actor_rollout_ref.hybrid_engine": False,
            "trainer.v1.trainer_mode": "separate_async",
            "trainer.v1.separate_async.parameter_sync_step": 1,
            f"{rollout}.nnodes": 1,
            f"{rollout}.n_gpus_per_node": self.rollout_gpus,
            f"{rollout}.checkpoint_engine.backend": "verl_server" if self.rollout == "verl_server" else "nccl",
        }
        if self.variant == "separate-group":
            settings[f"+{rollout}.checkpoint_engine.engine_kwargs.verl_server.transport"] = "group"
        return settings


@contextlib.contextmanager
def _running(command: list[str], env: dict[str, str], folder: Path, log: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a session of its own, and end the session's processes afterwards."""
    process = subprocess.Popen(
        command, env=env, cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        yield process
    finally:
        for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                process.send_signal(signal_number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_KILL_SECONDS)


@contextlib.contextmanager
def work_folder() -> Iterator[Path]:
    """Return a folder whose path is short enough for Ray's sockets. It is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="vs-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
