"""The folder of a model: a local path, or the snapshot of a hub id, and the JSON files in the folder.

The front process (`server.tokenizer`) reads configs and the tokenizer there, every scheduler process
(`worker.model_runner`) reads weights. Neither torch nor transformers is imported here, and huggingface_hub for hub ids
only: each of these imports takes seconds.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from verl_server.errors import BadRequestError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
"""NAME or ORGANIZATION/NAME."""
_HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.jinja", "*.txt", "*.model"]
_HUB_COPIES = ["consolidated*", "original/*", "onnx/*"]
_HUB_SECONDS = 5.0
"""Bound of the first contact with the hub. (Its own client tries again for half a minute, for every file.)"""


def local_folder(model_path: str, setting: str = "model_path") -> Path | None:
    """The folder that `model_path` names, or None if it can only be a hub id.

    Raises BadRequestError, which names `setting`, for a path at which there is no folder.
    """
    try:
        path = Path(model_path).expanduser()
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, an unknown ~user, a NUL
        raise BadRequestError(f"{setting}={model_path!r} is no path: {error}.") from None
    if is_folder:
        return path
    if exists:
        raise BadRequestError(f"{setting}={model_path!r} is a file. Give the folder that holds it.")
    if not _HUB_ID.fullmatch(model_path):
        raise BadRequestError(
            f"{setting}={model_path!r} does not exist. Give a folder with config.json and *.safetensors, or a hub id "
            "(NAME or ORGANIZATION/NAME)."
        )
    return None


def resolve_model_folder(model_path: str, revision: str | None = None, *, config_only: bool = False) -> Path:
    """The local folder of a model: `model_path` itself, or the hub's snapshot (downloaded if need be)."""
    if (folder := local_folder(model_path)) is not None:
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
        raise no_such_model(model_path, problem, str(error)) from error
    return Path(snapshot)


def hub_problem() -> str | None:
    """Why the hub cannot be asked, found out within seconds; None if it can."""
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        httpx.head(constants.ENDPOINT, timeout=_HUB_SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"{constants.ENDPOINT} cannot be reached: {error}"
    return None


def no_such_model(name: str, problem: str | None, reason: str) -> BadRequestError:
    """The error for a hub id that leads nowhere; `problem` is `hub_problem()`, `reason` what the hub's client says."""
    if problem is not None:
        return BadRequestError(
            f"model_path={name!r} is not a folder here, and no model in the hub's local cache; the hub cannot be asked "
            f"({problem}). Check the path, or the network."
        )
    first_line = next(iter(reason.strip().splitlines()), "").rstrip(".")
    return BadRequestError(
        f"model_path={name!r} is not a folder here, and no model that the hub shows you: {first_line}. Check "
        "the spelling; a private or gated model needs HF_TOKEN."
    )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises BadRequestError that names the file if it cannot be read or is no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadRequestError(f"Cannot read {path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise BadRequestError(f"{path} holds no JSON object.")
    return content
