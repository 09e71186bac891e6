"""The folder of a model: a local path or the snapshot of a hub id.

The front process (`server.tokenizer`) reads configs and the tokenizer in the folder. Every scheduler process
(`worker.model_runner`) reads weights. This module imports neither torch nor transformers, and huggingface_hub only for
hub ids, because each of these imports takes seconds.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from verl_server import lora
from verl_server.errors import BadRequestError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
"""Pattern of a hub id: NAME or ORGANIZATION/NAME."""
_HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.jinja", "*.txt", "*.model"]
_HUB_COPIES = ["consolidated*", "original/*", "onnx/*"]
_HUB_SECONDS = 5.0
"""Seconds to wait for the hub's first answer. The hub's client retries for half a minute, for each file."""


def local_folder(model_path: str, setting: str = "model_path") -> Path | None:
    """Return the folder at `model_path`, or None if there is no folder and `model_path` has the form of a hub id.

    Otherwise raise BadRequestError, which names `setting`.
    """
    try:
        path = Path(model_path).expanduser()
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, an unknown ~user, a NUL
        raise BadRequestError(f"{setting}={model_path!r} is not a valid path: {error}.") from None
    if is_folder:
        return path
    if exists:
        raise BadRequestError(f"{setting}={model_path!r} is a file. Set it to the folder that contains the file.")
    if not _HUB_ID.fullmatch(model_path):
        raise BadRequestError(
            f"{setting}={model_path!r} does not exist. Set it to a folder with config.json and *.safetensors, or to a "
            "hub id (NAME or ORGANIZATION/NAME)."
        )
    return None


def resolve_model_folder(
    model_path: str, revision: str | None = None, *, config_only: bool = False, setting: str = "model_path"
) -> Path:
    """Return the local folder of a model: `model_path` itself, or the hub's snapshot, which may be downloaded now.

    With `config_only` no weights are downloaded. Raise BadRequestError, which names `setting`, if there is no such
    model, and for an adapter.
    """
    if (folder := local_folder(model_path, setting)) is not None:
        refuse_adapter(folder, model_path)
        return folder
    from huggingface_hub import snapshot_download

    patterns = [p for p in _HUB_FILES if p != "*.safetensors"] if config_only else _HUB_FILES
    problem = hub_problem()
    try:
        snapshot = snapshot_download(
            model_path,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=_HUB_COPIES,
            local_files_only=problem is not None,
        )
    except Exception as error:
        raise no_such_model(model_path, problem, str(error), setting) from error
    refuse_adapter(Path(snapshot), model_path)
    return Path(snapshot)


def refuse_adapter(folder: Path, model_path: str) -> None:
    """Raise BadRequestError if PEFT has written an adapter into the folder, also beside a whole model.

    A server of the model alone would leave the adapter out in silence.
    """
    if (folder / "adapter_config.json").is_file():
        raise BadRequestError(
            f"{lora.MERGE_FOLDER}. model_path={model_path!r} is the folder of an adapter, because it has "
            "adapter_config.json, and adapters are not served."
        )


def config_folder(model_path: str, revision: str | None = None, *, setting: str = "model_path") -> Path:
    """Return the folder of a model as `resolve_model_folder` does, without weights. It has a config.json."""
    folder = resolve_model_folder(model_path, revision, config_only=True, setting=setting)
    if not (folder / "config.json").is_file():
        raise BadRequestError(f"{setting}={model_path!r} is not a model: the folder has no config.json.")
    return folder


def has_tokenizer(folder: Path) -> bool:
    """Return True if the folder has a file that may belong to a tokenizer. The check reads no file."""
    return any(next(folder.glob(name), None) for name in ("tokenizer*", "vocab*", "*.model", "*.tiktoken"))


def hub_problem() -> str | None:
    """Return the reason why the hub cannot be reached, or None if it can. The check takes a few seconds at most."""
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        httpx.head(constants.ENDPOINT, timeout=_HUB_SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"{constants.ENDPOINT} does not answer: {error}"
    return None


def no_such_model(name: str, problem: str | None, reason: str, setting: str) -> BadRequestError:
    """Return the error for a hub id without a model.

    `problem` is the result of `hub_problem()`; `reason` is the message of the hub's client.
    """
    if problem is not None:
        return BadRequestError(
            f"{setting}={name!r} is not a folder on this host, and the hub's local cache has no such model. The hub "
            f"cannot be reached ({problem}). Check the path, or the network."
        )
    first_line = next(iter(reason.strip().splitlines()), "").rstrip(".")
    return BadRequestError(
        f"{setting}={name!r} is not a folder on this host, and the hub has no such model that you may read: "
        f"{first_line}. Check the spelling. A private or gated model needs HF_TOKEN."
    )


def load_tokenizer(source: str, setting: str) -> Any:
    """Return the tokenizer of a folder or hub id. Raise BadRequestError, which names `setting`, if there is none.

    `setting` is what set `source`.
    """
    from transformers import AutoTokenizer

    folder = resolve_model_folder(source, config_only=True, setting=setting)
    if not has_tokenizer(folder):
        raise BadRequestError(f"{setting}={str(source)!r} has no tokenizer: the folder has no tokenizer.json.")
    return load_pretrained(AutoTokenizer, source, setting, folder)


def load_pretrained(kind: Any, source: str, setting: str, folder: Path, **options: Any) -> Any:
    """Return `kind.from_pretrained(folder)`: a tokenizer or model of transformers. Raise BadRequestError if it fails.

    `kind` is a class of transformers. `setting` is what set `source`, the name of `folder`: errors name both.
    """
    try:
        return kind.from_pretrained(folder, **options)
    except Exception as error:  # transformers raises many types of errors for a folder with a damaged file
        reason = next(iter(str(error).strip().splitlines()), "").rstrip(".")[:500]
        raise BadRequestError(
            f"{setting}={str(source)!r} cannot be loaded by {kind.__name__}: {type(error).__name__}: {reason}. "
            "Check that all files of the folder are complete, or name another folder or hub id."
        ) from error
