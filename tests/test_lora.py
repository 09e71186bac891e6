"""Settings, options and folders of LoRA adapters are answered with what to do instead, and then with what is refused.

Requests are in `tests/server/test_adapters.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from verl_server import (
    BadRequestError,
    Engine,
    HttpServerEngineAdapter,
    ServerArgs,
    ServerLaunchError,
    VerlEngine,
    lora,
)
from verl_server.backends.process.engine_args import check_engine_args
from verl_server.cli.main import main
from verl_server.compat.sglang.server_args import ServerArgs as SglangArgs
from verl_server.files.model_folder import local_folder, resolve_model_folder
from verl_server.server.text.tokenizer import ModelText
from verl_server.train import grpo
from verl_server.train.policy import load_policy

PAGES = Path(__file__).parents[1]


def check(message: str, what: str, way: str = "merge the adapter") -> None:
    words = message.lower()
    assert lora.PAGE in message and what in message, message
    assert words.index(way) < words.index("adapters are not served"), message


def test_the_word_is_found_and_no_part_of_another() -> None:
    names = ["exploration", "--exploration-rate", "floral", "default_mm_loras"]
    assert lora.first_named(names) == "default_mm_loras"
    assert [lora.first_named([name]) for name in ("--enable-lora", "QLORA_RANK", "add_lora")].count(None) == 0
    assert lora.first_named(names[:-1]) is None


def test_the_page_exists() -> None:
    file, _, anchor = lora.PAGE.partition("#")
    headings = re.findall(r"^#+ (.*)$", (PAGES / file).read_text(), re.MULTILINE)
    assert anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize(
    "options",
    [
        ["--enable-lora"],
        ["--lora-paths", "a=/a"],
        ["--lora_paths=a=/a"],
        ["--max-loras-per-batch", "4"],
        ["--lora-modules", "a=/a"],
        ["--max-lora-rank=16"],
    ],
)
@pytest.mark.parametrize("command", ["serve", "warm-up", "demo", "rollout"])
def test_options_of_the_command_line(command: str, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--model-path", "model", *options]) == 1
    check(capsys.readouterr().err, options[0].split("=")[0])
    assert grpo.main(["--model-path", "model", "--env-url", "http://e", *options]) == 2
    check(capsys.readouterr().err, options[0].split("=")[0])


@pytest.mark.parametrize("name", ["enable_lora", "lora_paths", "max_loras_per_batch", "max_cpu_loras"])
def test_arguments_of_an_engine(name: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        ServerArgs.from_kwargs(model_path="model", **{name: 1})
    check(str(caught.value), name)
    with pytest.raises(BadRequestError) as caught:
        ServerArgs(model_path="model", **{name: 1})
    check(str(caught.value), name)
    with pytest.raises(BadRequestError) as caught:
        check_engine_args({name: 1}, set(), {})
    check(str(caught.value), name)


@pytest.mark.parametrize("name", ["load_lora_adapter", "load_lora_adapter_from_tensors", "unload_lora_adapter"])
@pytest.mark.parametrize("kind", [Engine, HttpServerEngineAdapter, VerlEngine])
def test_methods_of_engines(kind: type[Any], name: str) -> None:
    engine = kind.__new__(kind)  # without a server
    with pytest.raises(BadRequestError) as caught:
        getattr(engine, name)("adapter", lora_path="/a")
    check(str(caught.value), name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_lora", True),
        ("lora_paths", ["a=/a"]),
        ("max_loaded_loras", 4),
        ("lora_backend", "triton"),
        ("lora_strict_loading", True),
    ],
)
def test_settings_of_sglang(name: str, value: Any) -> None:
    with pytest.raises(BadRequestError) as caught:
        SglangArgs(model_path="model", **{name: value}).resolve_once()
    check(str(caught.value), name)


def test_defaults_of_sglang_ask_for_no_adapter() -> None:
    SglangArgs(model_path="model", max_loras_per_batch=8, lora_backend="csgmv", enable_lora=False).resolve_once()


@pytest.fixture(params=["alone", "beside a model"])
def adapter(request: pytest.FixtureRequest, tiny_qwen3: Path, tmp_path: Path) -> Path:
    """Return the folder of an adapter."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    if request.param != "alone":
        for file in tiny_qwen3.iterdir():
            (folder / file.name).symlink_to(file)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "base"}))
    (folder / "adapter_model.safetensors").touch()
    return folder


@pytest.mark.parametrize(
    "load",
    [
        lambda folder: ModelText(ServerArgs(model_path=str(folder))),
        lambda folder: resolve_model_folder(str(folder)),
        lambda folder: load_policy(str(folder), torch.device("cpu")),
    ],
    ids=["server", "every rank, and vLLM", "trainer"],
)
def test_a_folder_of_an_adapter(adapter: Path, load: Callable[[Path], Any]) -> None:
    with pytest.raises((BadRequestError, ServerLaunchError)) as caught:
        load(adapter)
    check(str(caught.value), f"model_path={str(adapter)!r}")
    assert "save_pretrained" in str(caught.value)


def test_an_adapter_has_a_tokenizer_that_may_be_used(adapter: Path) -> None:
    assert local_folder(str(adapter), "tokenizer_path") == adapter
