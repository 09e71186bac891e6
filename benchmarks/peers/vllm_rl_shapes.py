"""The settings of `benchmarks.rl_shapes` on vLLM: `python -m benchmarks.peers.vllm_rl_shapes --shape 0.6b`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from typing import Any

from benchmarks.rl_shapes import PROMPTS, SETTINGS
from benchmarks.shapes import SHAPES, shape_folder
from benchmarks.workload import make_workload, uniform_workload


def main() -> None:
    import vllm  # type: ignore[import-not-found]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(PROMPTS), default="0.6b", help="shape of the model (0.6b)")
    parser.add_argument("--runs", type=int, default=2, help="runs of each setting; the last run is the figure (2)")
    args = parser.parse_args()
    print(json.dumps({"name": "run", "command": " ".join(sys.argv), "peer": f"vllm {vllm.__version__}"}), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        llm = vllm.LLM(
            model=str(shape_folder(temporary, args.shape)),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=SHAPES[args.shape]["max_position_embeddings"],
            max_num_seqs=256,
            logprobs_mode="processed_logprobs",
        )
        work = make_workload(args.shape)
        plain = 0.0
        for name, setting in SETTINGS.items():
            if setting.vllm == {}:
                continue
            logprobs = setting.options.get("top_logprobs_num", 0)
            own = {"detokenize": False, "ignore_eos": True, "logprobs": logprobs, "temperature": work.temperature}
            params = [
                vllm.SamplingParams(max_tokens=n, **own, **(setting.vllm or setting.params)) for n in work.output_lens
            ]
            rate = work.output_tokens / _seconds(llm, work.prompts, params, args.runs)
            plain = plain or rate
            _report(name, rate, "tokens/s", rate / plain)
        prompts = uniform_workload(*PROMPTS[args.shape], 1).prompts
        tokens, rates = sum(map(len, prompts)), []
        for wanted in (None, 0):
            params = [vllm.SamplingParams(max_tokens=1, detokenize=False, prompt_logprobs=wanted)] * len(prompts)
            rates.append(tokens / _seconds(llm, prompts, params, args.runs))
            _report(
                "prompts" if wanted is None else "prompt_logprobs", rates[-1], "prompt tokens/s", rates[-1] / rates[0]
            )


def _seconds(llm: Any, prompts: list[list[int]], params: list[Any], runs: int) -> float:
    """Return the seconds of the last of `runs` runs."""
    for _ in range(runs):
        llm.reset_prefix_cache()
        start = time.perf_counter()
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - start
    return seconds


def _report(name: str, value: float, unit: str, of_plain: float) -> None:
    figure = {"name": name, "value": round(value, 1), "unit": unit, "of_plain": round(of_plain, 3)}
    print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    main()
