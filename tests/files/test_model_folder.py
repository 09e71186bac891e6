"""A model path names a folder or a hub id; any other path is refused."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from verl_server import BadRequestError, ServerArgs, ServerLaunchError
from verl_server.files import model_folder as folder
from verl_server.files.model_folder import hub_problem, local_folder, resolve_model_folder
from verl_server.server.text.tokenizer import ModelText

PATHS = ["/no/such/folder", "./no", "~/no/such/folder", "runs/qwen/checkpoint-3", "no/such/", "not a valid id!!"]


@pytest.mark.parametrize("path", [*PATHS, "~nobody-of-this-name/x", "nul\0byte", "x/" * 3000])
def test_a_path_to_nothing_is_refused_without_asking_the_hub(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "hub_problem", lambda: pytest.fail("the hub was asked"))
    with pytest.raises(BadRequestError, match="tokenizer_path="):
        local_folder(path, "tokenizer_path")
    with pytest.raises(BadRequestError, match="model_path="):
        resolve_model_folder(path)


def test_folders_files_and_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert local_folder("org/model") == Path("org/model")
    with pytest.raises(BadRequestError, match="is a file"):
        local_folder("file")
    for name in ("gpt2", "Qwen/Qwen3-0.6B", "nobody/no_such.model"):
        assert local_folder(name) is None


@pytest.fixture
def unreachable_hub(monkeypatch: pytest.MonkeyPatch) -> str:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    return url


def test_a_hub_that_cannot_be_reached_is_asked_once(unreachable_hub: str) -> None:
    began = time.monotonic()
    with pytest.raises(ServerLaunchError, match="nosuch/model") as caught:
        ModelText(ServerArgs(model_path="nosuch/model"))
    assert unreachable_hub in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(BadRequestError, match=unreachable_hub):
        resolve_model_folder("nosuch/model")
    assert time.monotonic() - began < 15, "the hub's client retried"


def test_without_the_hub_its_cache_serves(
    unreachable_hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def download(name: str, *, local_files_only: bool, **options: Any) -> str:
        asked.append(local_files_only)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model_folder("org/model") == tmp_path
    monkeypatch.setattr(folder, "hub_problem", lambda: None)
    assert resolve_model_folder("org/model") == tmp_path
    assert asked == [True, False]


def test_offline_mode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub_problem() == "HF_HUB_OFFLINE is set"


def test_a_folder_without_a_tokenizer_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ServerLaunchError, match="skip_tokenizer_init"):
        ModelText(ServerArgs(model_path=str(tmp_path)))
    ModelText(ServerArgs(model_path=str(tmp_path), skip_tokenizer_init=True))
    with pytest.raises(ServerLaunchError, match="tokenizer_path='/no/such'"):
        ModelText(ServerArgs(model_path=str(tmp_path), tokenizer_path="/no/such"))
