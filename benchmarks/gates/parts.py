"""The parts of each set: command lines of benchmarks, with the bound of each."""

from __future__ import annotations

from dataclasses import dataclass

SET_SECONDS = 480.0
"""Most seconds of a set on GPUs, without its parts that are long or that run apart."""


@dataclass(frozen=True)
class Part:
    name: str
    command: str
    """Command line behind `python -m benchmarks.`, without the device."""
    bound: float
    """Seconds after which the part is killed."""
    needs: str = ""
    """Python package without which the part is left out. Its seconds do not count in `SET_SECONDS`, because the start
    of another project's engine takes a minute or more."""
    is_long: bool = False
    """The part runs only with `--long` or if `--only` names it."""


_SETTINGS = "without_logprobs top_p top_p_top_k min_p repetition_penalty presence_penalty top_logprobs"
_PUSH = "weight_sync --shape 8b --updates 10 --warmup 3 --check-every 5"

PARTS: dict[int, list[Part]] = {
    0: [
        Part("offline_tiny", "offline --shape tiny", 200),
        Part("offline_0.6b", "offline --shape 0.6b --uniform 16 64 64 --logprobs", 900),
        Part("startup_tiny", "startup --shape tiny --weights dummy safetensors", 120),
        Part("serving_tiny", "serving --shape tiny", 200),
        Part("multi_turn_tiny", "multi_turn --shape tiny --wait-scale 0.2", 120),
        Part("ablation_tiny", "ablation --shape tiny", 300),
    ],
    1: [
        # The first engine of each shape compiles its kernels, if nothing on the machine has compiled them yet.
        Part("offline_0.6b", f"offline --shape 0.6b --single --sampling {_SETTINGS}", 240),
        Part("constrained_0.6b", "constrained --shape 0.6b --output 128 --runs 2", 120),
        Part("offline_8b", "offline --shape 8b --single", 200),
        Part("push_8b", _PUSH, 150),
        Part("start_8b", "startup --shape 8b --bound 100", 120),
        Part("offline_0.6b_both", "offline --shape 0.6b --single --logprobs --prefix-cache", 150, is_long=True),
        Part("offline_8b_both", "offline --shape 8b --single --logprobs --prefix-cache", 200, is_long=True),
        Part("serving_0.6b", "serving --shape 0.6b --runs 3", 200, is_long=True),
        Part("multi_turn_0.6b", "multi_turn --shape 0.6b --agents 128 --turns 8", 240, is_long=True),
        Part("ablation_0.6b", "ablation --shape 0.6b", 500, is_long=True),
        Part(
            "ablation_8b",
            "ablation --shape 8b --only disable_cuda_graph disable_overlap_schedule fused_kernels",
            500,
            is_long=True,
        ),
        Part("sglang_push_8b", f"{_PUSH} --engine sglang", 300, needs="sglang"),
        Part("sglang_gaps_8b", f"{_PUSH} --engine sglang --generate 32", 400, needs="sglang"),
        Part("sglang_front_8b", "front_cost --engine sglang --shape 8b --runs 2", 480, needs="sglang"),
        Part("sglang_front_0.6b", "front_cost --engine sglang --shape 0.6b", 480, needs="sglang"),
        Part("sglang_sleep_8b", "colocated --engine sglang --shape 8b --cycles 10", 300, needs="sglang"),
        Part("sglang_deaths", "engine_deaths --engine sglang --shape 0.6b --requests 32", 400, needs="sglang"),
        Part("sglang_orders", "soak --engine sglang --updates 20", 400, needs="sglang"),
        Part("sglang_grpo", "training_runs --engine sglang --only grpo", 300, needs="sglang", is_long=True),
        Part("sglang_demo", "training_runs --engine sglang --only demo", 480, needs="sglang", is_long=True),
        Part("sglang_own_push_8b", "peers.sglang_push --shape 8b", 300, needs="sglang", is_long=True),
    ],
    2: [
        Part("replicas_8b", "replicas --shape 8b --replicas 2", 200),
        Part("offline_8b_tp2", "offline --shape 8b --tp 2 --single", 200),
        Part("push_tp2", f"{_PUSH} --trainer-ranks 2 --tp 2", 150),
        Part("push_replicas", f"{_PUSH} --trainer-ranks 2 --engines 2", 150),
        Part("push_group", f"{_PUSH} --source group", 150),
        Part("colocated", "colocated --shape 8b --trainer-ranks 2 --tp 2 --train-batch 2 1024 --cycles 4", 150),
        Part(
            "ablation_8b_tp2",
            "ablation --shape 8b --tp 2 --only disable_custom_all_reduce disable_cuda_graph",
            400,
            is_long=True,
        ),
        Part("vllm_tp2", "offline --shape 8b --tp 2 --set engine=vllm", 400, needs="vllm"),
        Part(
            "vllm_push_tp2",
            f"{_PUSH} --engine vllm --trainer-ranks 2 --tp 2",
            400,
            needs="vllm",
        ),
    ],
}
"""Number of GPUs (0: the CPU) -> parts in the order in which they run."""
