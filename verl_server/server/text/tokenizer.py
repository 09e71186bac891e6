"""`ModelText`: the parts of a model folder that concern text: tokenizer, chat template, end-of-sequence ids, config.

The launcher creates one `ModelText` for the TokenizerManager and the OpenAI routes. With `skip_tokenizer_init` it has
only the ids of the config, and refuses text with an error that names the setting. If possible, text workers use the
tokenizer as `FastTokens`, without transformers.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from verl_server.chat.output import OutputFormat
from verl_server.errors import BadRequestError, ServerLaunchError
from verl_server.files.json_files import convert, read_json
from verl_server.files.model_folder import config_folder, has_tokenizer, hub_problem, resolve_model_folder
from verl_server.server.limits import Limits
from verl_server.server.text import tokenizer_pipeline
from verl_server.server.text.text_tools import Decoder, ModelBounds, TextSetup
from verl_server.server_args import ServerArgs

_LARGEST_ID = 2**31 - 1
"""Token ids are int32."""


class _AddedTokens:
    """The added tokens of a tokenizer. Each has one text, and some are special."""

    def __init__(self, added: Mapping[int, Any]) -> None:
        """Take `added`: id -> `AddedToken`."""
        self._ids = {str(token.content): number for number, token in added.items()}
        self._special = frozenset(number for number, token in added.items() if token.special)

    def token_id(self, text: str) -> int | None:
        return self._ids.get(text)

    def is_special(self, token: int) -> bool:
        return token in self._special


class FastTokens(_AddedTokens):
    """A tokenizer of the `tokenizers` library, with the results of transformers' wrapper, but several times faster."""

    def __init__(self, backend: Any) -> None:
        """`backend` is a `tokenizers.Tokenizer`."""
        # A tokenizer's file may enable truncation and padding, which transformers disables.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        super().__init__(backend.get_added_tokens_decoder())

    @classmethod
    def from_json(cls, data: bytes) -> FastTokens:
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_buffer(data))

    def special_tokens(self) -> dict[str, int]:
        """Return text -> id of the special tokens, which are not part of any other text."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, ValueError) as error:  # for example a text with lone surrogates
            raise _untokenizable(error) from None
        return ids

    def decoder(self, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True) -> Decoder:
        """See `ModelText.decoder`. `spaces_between_special_tokens` has no effect: the tokenizer's file decides."""
        decode = self._backend.decode
        return lambda ids: str(decode(ids, skip_special_tokens=skip_special_tokens))


class ModelText:
    """Tokenizer, chat templates and configs of the served model."""

    def __init__(self, server_args: ServerArgs) -> None:
        """Read the configs of a folder or hub id. Raise ServerLaunchError, with the path, if it is not a model."""
        self._server_args = server_args
        try:
            self._read_configs()
            OutputFormat.of(None, server_args.tool_call_parser, server_args.reasoning_parser)
        except BadRequestError as error:
            raise ServerLaunchError(str(error)) from error
        self.tokenizer: Any = None
        self._fast: FastTokens | None = None
        self._tokenizer_json: bytes | None = None
        self._chat_template: str | None = None
        if server_args.chat_template is not None:
            self._chat_template = _read_template("chat_template", server_args.chat_template)
        self._allowed_templates = [
            _read_template("allowed_chat_templates", path) for path in server_args.allowed_chat_templates
        ]

    def _read_configs(self) -> None:
        args = self._server_args
        folder = config_folder(args.model_path, args.revision)
        self.config = read_json(folder / "config.json")
        generation_config = folder / "generation_config.json"
        self._generation_config = read_json(generation_config) if generation_config.is_file() else {}
        _check_eos_token_id(self.config, folder / "config.json")
        _check_eos_token_id(self._generation_config, generation_config)
        self._tokenizer_source = str(folder) if args.skip_tokenizer_init else _tokenizer_source(args, folder)

    def load_tokenizer(self) -> None:
        """Load the tokenizer, unless `skip_tokenizer_init` is set.

        This takes seconds. It is a separate method so that the caller can run it while the model loads.
        """
        if self._server_args.skip_tokenizer_init:
            return
        self.tokenizer = _load_tokenizer(self._server_args, self._tokenizer_source)
        if _is_plain_fast(self.tokenizer):
            self._fast = FastTokens(self.tokenizer.backend_tokenizer)
            self._tokenizer_json = self.tokenizer.backend_tokenizer.to_str().encode()

    @property
    def tokenizer_json(self) -> bytes | None:
        """The tokenizer as JSON of the `tokenizers` library.

        None if there is no tokenizer, or if it is of another library.
        """
        return self._tokenizer_json

    def setup(self, limits: Limits, bounds: ModelBounds) -> TextSetup:
        """Return the data with which a text worker encodes and renders in the same way."""
        tokenizer = self.tokenizer
        return TextSetup(
            tokenizer=self._tokenizer_json,
            server_args=self._server_args.replace(api_key=None, admin_api_key=None, host="127.0.0.1").to_json(),
            templates=self._chat_template or getattr(tokenizer, "chat_template", None),
            allowed_templates=self._allowed_templates,
            special_tokens={name: str(token) for name, token in getattr(tokenizer, "special_tokens_map", {}).items()},
            limits=limits,
            bounds=bounds,
            eos_token_ids=self.eos_token_ids,
        )

    @property
    def eos_token_ids(self) -> list[int]:
        """Ids that end a completion: from the generation config (or else from the config), and from the tokenizer."""
        ids = self._generation_config.get("eos_token_id", self.config.get("eos_token_id"))
        found = list(ids) if isinstance(ids, list) else [ids]
        if self.tokenizer is not None:
            found.append(self.tokenizer.eos_token_id)
        return list(dict.fromkeys(i for i in found if i is not None))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        tokenizer = self._need_tokenizer()
        if self._fast is not None:
            return self._fast.encode(text, add_special_tokens)
        try:
            return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
        except (TypeError, ValueError) as error:
            raise _untokenizable(error) from None

    def decoder(self, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True) -> Decoder:
        """Return a function from ids to their exact text. Spaces are not cleaned up, which would hide tokens."""
        tokenizer = self._need_tokenizer()
        if self._fast is not None:
            return self._fast.decoder(skip_special_tokens, spaces_between_special_tokens)
        return lambda ids: str(
            tokenizer.decode(
                ids,
                skip_special_tokens=skip_special_tokens,
                spaces_between_special_tokens=spaces_between_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )

    def token_id(self, text: str) -> int | None:
        return self._added().token_id(text)

    def is_special(self, token: int) -> bool:
        return self._added().is_special(token)

    def _added(self) -> _AddedTokens:
        return _AddedTokens(self._need_tokenizer().added_tokens_decoder)

    def _need_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise BadRequestError(
                "This server runs with skip_tokenizer_init=True and cannot process text: send input_ids to "
                "/generate, or start the server without skip_tokenizer_init."
            )
        return self.tokenizer


def _check_eos_token_id(config: Mapping[str, Any], file: Path) -> None:
    """Raise BadRequestError, which names the file, unless `eos_token_id` is absent, null, an id or a list of ids."""
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(i) is not int or not 0 <= i <= _LARGEST_ID for i in ids):
        raise BadRequestError(
            f"{file}: eos_token_id must be a token id from 0 to {_LARGEST_ID}, a list of ids, or null, but is "
            f"{reprlib.repr(value)}. Set it to the ids that end a completion."
        )


def _tokenizer_source(args: ServerArgs, model_folder: Path) -> str:
    """Return the folder or hub id of the tokenizer. Raise BadRequestError for a folder without a tokenizer."""
    folder = model_folder
    if args.tokenizer_path is not None:
        folder = resolve_model_folder(args.tokenizer_path, args.revision, config_only=True, setting="tokenizer_path")
    source = args.tokenizer_path or args.model_path
    if not has_tokenizer(folder):
        raise BadRequestError(
            f"{source!r} has no tokenizer. Set tokenizer_path, or skip_tokenizer_init=True to serve token ids only."
        )
    # The local snapshot has no Python files, so code of a tokenizer must be loaded from the hub id.
    return source if args.trust_remote_code else str(folder)


def _load_tokenizer(server_args: ServerArgs, source: str) -> Any:
    folder = Path(source)
    _check_chat_template(folder / "tokenizer_config.json")
    try:
        kind = _tokenizer_class(folder, server_args.trust_remote_code)
        tokenizer = kind.from_pretrained(
            source,
            revision=server_args.revision,
            trust_remote_code=server_args.trust_remote_code,
            local_files_only=not folder.is_dir() and hub_problem() is not None,
        )
        tokenizer_pipeline.choose_parts(tokenizer, folder / "tokenizer.json", server_args.tokenizer_pipeline)
        return tokenizer
    except Exception as error:  # transformers raises many types of errors for a folder without a tokenizer
        raise ServerLaunchError(
            f"No tokenizer could be loaded from {source!r}: {error}\n"
            "Set tokenizer_path, or skip_tokenizer_init=True to serve token ids only."
        ) from error


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    """The key of tokenizer_config.json that holds one chat template or several."""

    chat_template: str | list[_NamedTemplate] | None = None


def _check_chat_template(file: Path) -> None:
    """Raise ServerLaunchError, which names the file and the key, if transformers cannot read the chat template."""
    if not file.is_file():
        return
    try:
        convert(read_json(file), _TokenizerConfig, str(file))
    except BadRequestError as error:
        raise ServerLaunchError(f"{error}. Correct the file, or set tokenizer_path to another folder.") from None


def _tokenizer_class(folder: Path, trust_remote_code: bool) -> Any:
    """Return the class that AutoTokenizer would choose, without AutoTokenizer if the folder's files name the class.

    The import of AutoTokenizer takes seconds, because it also imports torch, which this process does not need.
    """
    files = [folder / name for name in ("tokenizer.json", "tokenizer_config.json", "config.json")]
    if not trust_remote_code and all(path.is_file() for path in files):
        tokenizer_config, config = read_json(files[1]), read_json(files[2])
        named, model_type = tokenizer_config.get("tokenizer_class"), config.get("model_type")
        if "auto_map" not in tokenizer_config:
            # AutoTokenizer uses Qwen2Tokenizer for every qwen2 model. Other models use the general class if named.
            if named in ("PreTrainedTokenizerFast", "TokenizersBackend") and model_type != "qwen2":
                from transformers import PreTrainedTokenizerFast

                return PreTrainedTokenizerFast
            if named in ("Qwen2Tokenizer", "Qwen2TokenizerFast") and model_type in ("qwen2", "qwen3"):
                from transformers import Qwen2Tokenizer

                return Qwen2Tokenizer
    from transformers import AutoTokenizer

    return AutoTokenizer


def _is_plain_fast(tokenizer: Any) -> bool:
    """Return True if the tokenizer only calls its backend, so that `FastTokens` has the same results."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or getattr(tokenizer, "split_special_tokens", False):
        return False
    methods = ("encode", "_encode_plus", "_decode")
    return all(getattr(kind, name) is getattr(PreTrainedTokenizerFast, name) for name in methods)


def _untokenizable(error: Exception) -> BadRequestError:
    return BadRequestError(f"The text cannot be tokenized: {error}")


def _read_template(setting: str, path: str) -> str:
    from verl_server.chat.templates import ChatTemplate

    try:
        source = Path(path).read_text(encoding="utf-8")
        ChatTemplate(source)
    except (OSError, UnicodeDecodeError) as error:
        raise ServerLaunchError(f"{setting}: {path!r} cannot be read: {error}") from error
    except BadRequestError as error:
        raise ServerLaunchError(f"{setting}: {path!r}: {error}") from None
    return source
