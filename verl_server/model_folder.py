"""The folder of a model: a local path, or the snapshot of a hub id, and the JSON files in the folder.

Called by the front process (`server.tokenizer`) and by every scheduler process (`worker.model_runner`). Neither torch
nor transformers is imported here, and huggingface_hub for hub ids only: each of these imports takes seconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verl_server.errors import BadRequestError

_HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.jinja", "*.txt", "*.model"]
_HUB_COPIES = ["consolidated*", "original/*", "onnx/*"]


def resolve_model_folder(model_path: str, revision: str | None = None, *, config_only: bool = False) -> Path:
    """The local folder of a model: `model_path` itself, or the hub's snapshot (downloaded if it is not cached).

    `config_only` leaves the weights out of the download. Raises BadRequestError if there is neither.
    """
    folder = Path(model_path).expanduser()
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download

        patterns = [p for p in _HUB_FILES if p != "*.safetensors"] if config_only else _HUB_FILES
        return Path(
            snapshot_download(model_path, revision=revision, allow_patterns=patterns, ignore_patterns=_HUB_COPIES)
        )
    except Exception as error:
        raise BadRequestError(
            f"model_path {model_path!r} is neither a local folder nor a hub id that can be reached "
            f"({type(error).__name__}: {first_line(error)}). Give the path of a folder with config.json and "
            "*.safetensors, or a hub id while the hub is reachable (HF_HUB_OFFLINE unset, HF_TOKEN set if private)."
        ) from error


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


def first_line(error: Exception) -> str:
    """The first line of an error's text, or the name of its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
