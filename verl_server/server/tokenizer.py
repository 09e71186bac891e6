"""What a model folder says about text: tokenizer, chat template, end-of-sequence ids, architecture.

`ModelText` is made once by the launcher and used by the TokenizerManager and the OpenAI routes. With
`skip_tokenizer_init` it knows the ids of the config only, and refuses text with the remedy.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_server.errors import BadRequestError, ServerLaunchError
from verl_server.model_folder import hub_problem, local_folder, read_json, resolve_model_folder
from verl_server.server_args import ServerArgs

Decoder = Callable[[list[int]], str]


class ModelText:
    """Text side of the served model."""

    def __init__(self, server_args: ServerArgs) -> None:
        """Read the configs of the folder or hub id; raises ServerLaunchError naming the path if it is no model."""
        self._server_args = server_args
        try:
            self._read_configs()
        except BadRequestError as error:
            raise ServerLaunchError(str(error)) from error
        self.tokenizer: Any = None
        self.chat_template: str | None = None
        if server_args.chat_template is not None:
            self.chat_template = _read_template(server_args.chat_template)

    def _read_configs(self) -> None:
        args = self._server_args
        folder = resolve_model_folder(args.model_path, args.revision, config_only=True)
        if not (folder / "config.json").is_file():
            raise BadRequestError(f"model_path={args.model_path!r} is a folder without config.json: not a model.")
        self.config = read_json(folder / "config.json")
        generation_config = folder / "generation_config.json"
        self._generation_config = read_json(generation_config) if generation_config.is_file() else {}
        self._tokenizer_source = str(folder) if args.skip_tokenizer_init else _tokenizer_source(args, folder)

    def load_tokenizer(self) -> None:
        """The slow part (seconds), apart so that it overlaps with loading the model; nothing if it is unwanted."""
        if not self._server_args.skip_tokenizer_init:
            self.tokenizer = _load_tokenizer(self._server_args, self._tokenizer_source)

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


def _tokenizer_source(args: ServerArgs, model_folder: Path) -> str:
    """The folder or hub id of the tokenizer. Raises BadRequestError for a folder that holds none."""
    folder: Path | None = model_folder
    if args.tokenizer_path is not None:
        folder = local_folder(args.tokenizer_path, "tokenizer_path")
    source = args.tokenizer_path or args.model_path
    if folder is not None and not _has_tokenizer(folder):
        raise BadRequestError(
            f"{source!r} has no tokenizer. Set tokenizer_path, or skip_tokenizer_init=True to serve token ids only."
        )
    # Code of a tokenizer is looked for under the hub id: the snapshot was taken without it.
    return source if folder is None or args.trust_remote_code else str(folder)


def _has_tokenizer(folder: Path) -> bool:
    """Whether any file there may belong to a tokenizer: a look that takes no time, before anything is started."""
    return any(next(folder.glob(name), None) for name in ("tokenizer*", "vocab*", "*.model", "*.tiktoken"))


def _load_tokenizer(server_args: ServerArgs, source: str) -> Any:
    folder = Path(source)
    try:
        kind = _tokenizer_class(folder, server_args.trust_remote_code)
        return kind.from_pretrained(
            source,
            revision=server_args.revision,
            trust_remote_code=server_args.trust_remote_code,
            local_files_only=not folder.is_dir() and hub_problem() is not None,
        )
    except Exception as error:  # transformers raises many kinds for a folder without a tokenizer
        raise ServerLaunchError(
            f"No tokenizer could be loaded from {source!r}: {error}\n"
            "Set tokenizer_path, or skip_tokenizer_init=True to serve token ids only."
        ) from error


def _tokenizer_class(folder: Path, trust_remote_code: bool) -> Any:
    """The class that AutoTokenizer would choose, without importing it where the folder's files name the class.

    The import of AutoTokenizer imports torch as well, which this process does not need and which takes seconds.
    """
    files = [folder / name for name in ("tokenizer.json", "tokenizer_config.json", "config.json")]
    if not trust_remote_code and all(path.is_file() for path in files):
        tokenizer_config, config = read_json(files[1]), read_json(files[2])
        named, model_type = tokenizer_config.get("tokenizer_class"), config.get("model_type")
        if "auto_map" not in tokenizer_config:
            # A qwen2 model always gets Qwen2Tokenizer; others get the general class if it is named.
            if named in ("PreTrainedTokenizerFast", "TokenizersBackend") and model_type != "qwen2":
                from transformers import PreTrainedTokenizerFast

                return PreTrainedTokenizerFast
            if named in ("Qwen2Tokenizer", "Qwen2TokenizerFast") and model_type in ("qwen2", "qwen3"):
                from transformers import Qwen2Tokenizer

                return Qwen2Tokenizer
    from transformers import AutoTokenizer

    return AutoTokenizer


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ServerLaunchError(f"chat_template={path!r} cannot be read: {error}") from error
