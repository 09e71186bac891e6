"""What a model folder says about text: tokenizer, chat template, end-of-sequence ids, architecture.

`ModelText` is made once by the launcher and used by the TokenizerManager and the OpenAI routes. With
`skip_tokenizer_init` it knows the ids of the config only, and refuses text with the remedy.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_server.errors import BadRequestError, ServerLaunchError
from verl_server.server_args import ServerArgs

Decoder = Callable[[list[int]], str]


class ModelText:
    """Text side of the served model."""

    def __init__(self, server_args: ServerArgs) -> None:
        """Read the configs of the folder or hub id; raises ServerLaunchError naming the path if it is no model."""
        self._server_args = server_args
        self.config = _read_json(server_args, "config.json", required=True)
        self._generation_config = _read_json(server_args, "generation_config.json", required=False)
        self.tokenizer: Any = None
        self.chat_template: str | None = None
        if server_args.chat_template is not None:
            self.chat_template = _read_template(server_args.chat_template)

    def load_tokenizer(self) -> None:
        """The slow part (seconds), apart so that it overlaps with loading the model; nothing if it is unwanted."""
        if not self._server_args.skip_tokenizer_init:
            self.tokenizer = _load_tokenizer(self._server_args)

    @property
    def eos_token_ids(self) -> list[int]:
        """Ids that end a completion: of the generation config, else the config, and the tokenizer's."""
        ids = self._generation_config.get("eos_token_id", self.config.get("eos_token_id"))
        found = list(ids) if isinstance(ids, list) else [ids]
        if self.tokenizer is not None:
            found.append(self.tokenizer.eos_token_id)
        return list(dict.fromkeys(i for i in found if isinstance(i, int)))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        tokenizer = self._need("text")
        try:
            return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
        except (TypeError, ValueError) as error:  # lone surrogates
            raise BadRequestError(f"The text cannot be tokenized: {error}") from None

    def decoder(self, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True) -> Decoder:
        """A function from ids to exactly their text (no cleanup of spaces, which would hide tokens)."""
        tokenizer = self._need("text")
        if getattr(tokenizer, "is_fast", False):
            # The wrapped tokenizer is several times faster than the wrapper, and this runs once a token.
            backend = tokenizer.backend_tokenizer
            return lambda ids: str(backend.decode(ids, skip_special_tokens=skip_special_tokens))
        return lambda ids: str(
            tokenizer.decode(
                ids,
                skip_special_tokens=skip_special_tokens,
                spaces_between_special_tokens=spaces_between_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation. Template faults are the caller's: BadRequestError."""
        tokenizer = self._need("chat messages")
        if self.chat_template is not None:
            options.setdefault("chat_template", self.chat_template)
        elif getattr(tokenizer, "chat_template", None) is None:
            raise BadRequestError(
                "The tokenizer has no chat template: pass --chat-template, or use /v1/completions or /generate."
            )
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:  # a Jinja template may raise anything
            raise BadRequestError(f"The chat template refused the messages: {error}") from error
        return self.encode(text, add_special_tokens=False)

    def _need(self, what: str) -> Any:
        if self.tokenizer is None:
            raise BadRequestError(
                f"This server runs with skip_tokenizer_init=True and cannot take {what}: send input_ids to /generate, "
                "or start it without skip_tokenizer_init."
            )
        return self.tokenizer


def _read_json(server_args: ServerArgs, name: str, *, required: bool) -> dict[str, Any]:
    path = _resolve(server_args, name, required)
    if path is None:
        return {}
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ServerLaunchError(f"Cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ServerLaunchError(f"{path} holds no JSON object.")
    return content


def _resolve(server_args: ServerArgs, name: str, required: bool) -> str | None:
    """Local path of a file of the model folder or hub repository, None if it has no such file."""
    folder = Path(server_args.model_path).expanduser()
    if folder.is_dir():
        if (folder / name).is_file():
            return str(folder / name)
        if required:
            raise ServerLaunchError(f"model_path={server_args.model_path!r} is a folder without {name}: not a model.")
        return None
    if folder.is_absolute() or server_args.model_path.startswith((".", "~")) or folder.exists():
        raise ServerLaunchError(f"model_path={server_args.model_path!r} does not exist or is not a folder.")
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(
            server_args.model_path, name, revision=server_args.revision, _raise_exceptions_for_missing_entries=required
        )
    except (OSError, ValueError) as error:
        raise ServerLaunchError(
            f"model_path={server_args.model_path!r} is neither a local folder nor a hub id that can be reached: {error}"
        ) from error
    return str(found) if found is not None else None


def _load_tokenizer(server_args: ServerArgs) -> Any:
    from transformers import AutoTokenizer

    source = server_args.tokenizer_path or server_args.model_path
    try:
        return AutoTokenizer.from_pretrained(
            source, revision=server_args.revision, trust_remote_code=server_args.trust_remote_code
        )
    except Exception as error:  # transformers raises many kinds for a folder without a tokenizer
        raise ServerLaunchError(
            f"No tokenizer could be loaded from {source!r}: {error}\n"
            "Set tokenizer_path, or skip_tokenizer_init=True to serve token ids only."
        ) from error


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ServerLaunchError(f"chat_template={path!r} cannot be read: {error}") from error
