"""Server and trainer compute in one dtype, or the run is refused with both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.test_train_command import SETTINGS, lines
from verl_server.errors import BadRequestError
from verl_server.server_args import ServerArgs
from verl_server.train import grpo, run, run_servers
from verl_server.train.dtypes import check_dtypes, passes_dtype, served_dtype
from verl_server.train.options import TrainArgs


@pytest.mark.parametrize(
    ("info", "dtype"),
    [
        ({"scheduler_info": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"dtype": "half"}, "float16"),  # SGLang's own setting
        ({"dtype": "auto"}, None),
        ({"model_config": {"dtype": "torch.float32"}}, "float32"),
        ({"scheduler_info": {"engine_version": "vllm"}}, None),
    ],
)
def test_what_servers_report(info: dict[str, Any], dtype: str | None) -> None:
    assert served_dtype(info) == dtype


def test_a_mismatch_is_refused_with_both_values_and_flags(caplog: pytest.LogCaptureFixture) -> None:
    check_dtypes(torch.bfloat16, "bfloat16", "The server", False)
    with pytest.raises(BadRequestError) as caught:
        check_dtypes(torch.bfloat16, "float32", "The server", False)
    for part in ("float32", "--server.dtype bfloat16", "--compute-dtype float32", "--allow-dtype-mismatch"):
        assert part in str(caught.value)
    assert not caplog.records
    check_dtypes(torch.bfloat16, "float32", "The server", True)
    check_dtypes(torch.bfloat16, None, "The server at http://s", False)
    assert ["allowed by" in r.message for r in caplog.records] == [True, False]
    assert "http://s does not report its dtype, so it is not checked" in caplog.records[1].message


def test_auto_follows_the_device() -> None:
    assert passes_dtype("auto", torch.device("cpu")) == torch.float32
    assert passes_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert passes_dtype("float16", torch.device("cpu")) == torch.float16


@pytest.mark.parametrize(("set_dtype", "launched"), [("auto", "bfloat16"), ("float16", "float16")])
def test_a_launched_server_gets_the_dtype_of_the_passes(
    monkeypatch: pytest.MonkeyPatch, set_dtype: Any, launched: str
) -> None:
    class Launched(Exception):
        pass

    def launch(*_: Any, **settings: Any) -> Any:
        raise Launched(settings["dtype"])

    monkeypatch.setattr(run_servers, "launch_engine", launch)
    args = TrainArgs(model_path="m", env_url="http://e", server=ServerArgs(model_path="", dtype=set_dtype))
    with (
        pytest.raises(Launched, match=launched),
        run_servers.serving(args, torch.device("cuda"), torch.bfloat16, None),  # type: ignore[arg-type]
    ):
        pass


def test_options_with_two_dtypes_are_wrong_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are refused with status 2 before the ranks meet."""
    monkeypatch.setattr(run, "setup_ranks", None)
    where = ["--model-path", "nowhere", "--env-url", "http://127.0.0.1:9", "--out", str(tmp_path / "run"), *SETTINGS]
    assert grpo.main([*where, "--server.dtype", "bfloat16"]) == 2
    assert "computes in bfloat16, and the trainer's passes in float32" in capsys.readouterr().err
    assert grpo.main([*where, "--compute-dtype", "bfloat16", "--server.dtype", "float16"]) == 2
    error = capsys.readouterr().err
    assert "computes in float16, and the trainer's passes in bfloat16" in error and "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_an_attached_server_of_another_dtype(
    policy_folder: Path, server_url: str, environment_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--model-path", str(policy_folder), "--env-url", environment_url, "--server", server_url]
    command = [*where, "--out", str(tmp_path / "run"), *SETTINGS, "--steps", "1", "--compute-dtype", "bfloat16"]
    assert grpo.main(command) == 1
    error = capsys.readouterr().err
    assert f"The server at {server_url} computes in float32, and the trainer's passes in bfloat16" in error
    assert grpo.main([*command, "--allow-dtype-mismatch"]) == 0
    (step,) = lines(tmp_path / "run/metrics.jsonl")
    assert 0 < step["logprob_kl"] < step["logprob_gap_mean"] < step["logprob_gap"]
