"""The workload equals the published one, and the computation of its least time matches the documentation."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.options import engine_settings, make_parser, parse_setting, switches
from benchmarks.shapes import SHAPES
from benchmarks.workload import Ceilings, Workload, least_seconds, make_workload, uniform_workload
from verl_server.server_args import ServerArgs


def test_the_workload_is_nano_vllms() -> None:
    work = make_workload("0.6b")
    assert (len(work.prompts), work.output_tokens) == (256, 133966)
    assert work.prompts[0][:3] == [6311, 6890, 663], "after random.seed(0), a length must be drawn before the ids"
    assert max(map(max, work.prompts)) <= 10000
    assert {p["temperature"] for p in work.sampling_params()} == {0.6}


def test_part_of_the_workload_and_more_than_all_of_it() -> None:
    work = make_workload("tiny")
    assert work.first(None) is work
    assert work.first(3).prompts == work.prompts[:3]
    assert work.first(65).prompts[64] == work.prompts[0]
    assert work.first(65).output_tokens == 65 * 128
    assert uniform_workload(2, 5, 7).output_lens == [7, 7]


def test_least_seconds_counts_weights_once_a_step() -> None:
    """With unlimited FLOP/s, the least time of one sequence is the bytes of weights and KV over the bandwidth."""
    shape, work = SHAPES["0.6b"], Workload([[1]], [11], 0.0)
    weights = 28 * 1024 * (2 * 2048 + 2 * 1024 + 3 * 3072) + 1024 * 151936
    keys_and_values = 2 * 1024 * 28 * (11 * 1 + 11 * 11 / 2)
    seconds = least_seconds(shape, work, Ceilings(float("inf"), 1e9), itemsize=2)
    assert seconds == pytest.approx(2 * (10 * weights + keys_and_values) / 1e9)


def test_settings_are_fields_of_server_args() -> None:
    assert parse_setting("disable_radix_cache=true") == ("disable_radix_cache", True)
    assert parse_setting("chunked_prefill_size=512") == ("chunked_prefill_size", 512)
    assert parse_setting("attention_backend=torch") == ("attention_backend", "torch")
    for wrong in ("no_such=1", "page_size=many", "page_size", "attention_backend=magic"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_setting(wrong)


def test_what_is_set_wins(tmp_path: object) -> None:
    args = make_parser("x", "").parse_args(["--set", "page_size=32", "--set", "load_format=auto"])
    settings = engine_settings(args, tmp_path, page_size=8, tp_size=1)  # type: ignore[arg-type]
    assert (settings["page_size"], settings["load_format"]) == (32, "auto")


def test_switches_turn_something_off() -> None:
    """Each switch differs from the default, so that an ablation changes something."""
    args = ServerArgs(model_path="x")
    assert len(switches()) >= 4
    assert all(getattr(args, name) != value for name, value in switches().items())
    args.replace(**switches())
