"""`benchmarks.train_step` runs on the CPU, prints the figures that it documents, and computes its limit correctly."""

from __future__ import annotations

import pytest

from benchmarks import train_step
from tests.benchmark.lines import figures
from tests.train.conftest import make_trajectory
from verl_server.train.batches import Sample

SMALL = ["--set", "cpu_threads=1", "--set", "kv_cache_gib=0.1", "--prompt", "4", "--tokens", "12", "--steps", "1"]


def test_the_figures_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    train_step.main([*SMALL, "--recompute", "yes", "--groups", "2", "--group-size", "2", "--minibatches", "2"])
    found = figures(capsys)
    rate = found["train_tokens_per_s"]
    assert rate["value"] == found["train_tokens_per_s_run"]["value"]
    assert rate["recompute"] is True and rate["padding"] == 0
    assert rate["of_limit"] == pytest.approx(rate["value"] / rate["limit"], rel=0.01)
    assert found["logprob_gap"]["value"] < 100  # both sides compute in fp32
    for name in ("trainer_peak_gib", "server_gib", "push", "first_push", "rollout_tokens_per_s", "gemm_ceiling"):
        assert found[name]["value"] > 0, name


def test_the_arithmetic_limit_by_hand() -> None:
    shape = {"hidden_size": 2, "num_hidden_layers": 3, "head_dim": 4, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "intermediate_size": 5, "vocab_size": 11}
    samples = [Sample(make_trajectory(0, 1.0, 4), 1.0)]  # 6 tokens, 4 of them sampled
    weights = 3 * (2 * 2 * 8 + 2 * 2 * 4 + 3 * 2 * 5)
    attention = 3 * 2 * 8 * 6 * 6 / 2
    head = 6 * 2 * 11 * 4
    assert train_step.least_flop(shape, samples, recompute=False) == 6 * weights * 6 + 6 * attention + head
    assert train_step.least_flop(shape, samples, recompute=True) == 8 * weights * 6 + 8 * attention + head


def test_work_that_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--group-size", "1"], ["--prompt", "48"], ["--steps", "0"], ["--tp", "2"]):
        with pytest.raises(SystemExit):
            train_step.parse_args(flags)
    assert "--group-size must be at least 2" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train_step.parse_args(["--device", "cpu", "--set", "dtype=bfloat16"])
    assert "dtype=bfloat16: the trainer's passes are float32" in capsys.readouterr().err
