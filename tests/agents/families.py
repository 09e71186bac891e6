"""Model folders with the tokenizers and the chat templates of released models.

The vocabularies and the templates are files of packages (`packages_with_files.txt`), so nothing is downloaded from a
hub. The weights are random: a tiny model has the vocabulary of the real one. `conftest.py` makes the folders.
"""

from __future__ import annotations

import base64
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mistral_common.integrations.chat_templates.chat_templates import generate_chat_template
from mistral_common.tokens.tokenizers.base import TokenizerVersion
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter, bytes_to_unicode

from verl_server.models.tiny import make_model_folder

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "init_std": 0.2,
}
"""The vocabulary has most of the weights. With this `init_std` a random policy samples from thousands of tokens."""


QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""How Qwen's tokenizer splits a text into words."""


@dataclass(frozen=True)
class Family:
    """What a released model brings: the text, and the weights' architecture."""

    name: str
    arch: str
    tokenizer: PreTrainedTokenizerFast
    ends: tuple[str, ...]
    """Tokens that end a turn. The first one is the usual end."""

    @property
    def end_ids(self) -> list[int]:
        ids: list[int] = self.tokenizer.convert_tokens_to_ids(list(self.ends))
        return ids

    def token_id(self, text: str) -> int:
        number = self.tokenizer.convert_tokens_to_ids(text)
        assert isinstance(number, int)
        return number

    def make_folder(self, folder: Path) -> Path:
        """Write a random model with this tokenizer."""
        tokenizer = self.tokenizer
        start = tokenizer.bos_token_id
        return make_model_folder(
            folder,
            self.arch,  # type: ignore[arg-type]
            tokenizer=tokenizer,
            vocab_size=-(-len(tokenizer) // 64) * 64,
            bos_token_id=self.end_ids[0] if start is None else start,
            eos_token_id=self.end_ids,
            pad_token_id=None,
            **SMALL,
            **({"sliding_window": None} if self.arch == "mistral" else {}),
        )


def make_family(name: str) -> Family:
    """Return the family of this name: qwen3, llama3, mistral or magistral."""
    return {"qwen3": _qwen3, "llama3": _llama3, "mistral": _mistral, "magistral": _magistral}[name]()


FAMILIES = ("qwen3", "llama3", "mistral", "magistral")


def _qwen3() -> Family:
    """Qwen's vocabulary, as dashscope has it, and the tokens that Qwen3 adds behind it."""
    tokenizer = _from_tiktoken(data_file("dashscope", "resources/qwen.tiktoken"), QWEN_PATTERN)
    tokenizer.normalizer = normalizers.NFC()
    vision = [f"<|{name}|>" for name in ("object_ref_start", "object_ref_end", "box_start", "box_end", "quad_start")]
    vision += [f"<|{name}|>" for name in ("quad_end", "vision_start", "vision_end", "vision_pad", "image_pad")]
    _add(tokenizer, ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *vision, "<|video_pad|>"], special=True)
    code = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
    tags = ["<tool_call>", "</tool_call>", *code, "<tool_response>", "</tool_response>", "<think>", "</think>"]
    _add(tokenizer, tags, special=False)
    assert tokenizer.token_to_id("<|im_end|>") == 151645 and tokenizer.token_to_id("</think>") == 151668
    fast = _fast(tokenizer, _trl_template("qwen3"), eos_token="<|im_end|>", pad_token="<|endoftext|>")
    return Family("qwen3", "qwen3", fast, ("<|im_end|>", "<|endoftext|>"))


def _llama3() -> Family:
    from llama_models.llama3.tokenizer import Tokenizer as LlamaTokenizer

    path = data_file("llama_models", "llama3/tokenizer.model")
    tokenizer = _from_tiktoken(path, LlamaTokenizer.pat_str)
    special = LlamaTokenizer(path).special_tokens
    _add(tokenizer, sorted(special, key=lambda text: special[text]), special=True)
    assert tokenizer.token_to_id("<|eot_id|>") == special["<|eot_id|>"] == 128009
    fast = _fast(tokenizer, _trl_template("llama3_1"), bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")
    return Family("llama3", "llama", fast, ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"))


def _mistral() -> Family:
    """Mistral Nemo: tekken, version 3 of the chat format, where a call is JSON with an id of 9 characters."""
    special = [token["token_str"] for token in Tekkenizer.DEPRECATED_SPECIAL_TOKENS]
    return Family("mistral", "mistral", _tekken("v3", special, thinking=False), ("</s>",))


def _magistral() -> Family:
    """Version 13 of the chat format: the name of a call and its arguments behind tags, and reasoning."""
    special = [token["token_str"] for token in Tekkenizer.DEPRECATED_SPECIAL_TOKENS]
    later = ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
    special += [text for text in later if text not in special]
    return Family("magistral", "mistral", _tekken("v13", special, thinking=True), ("</s>",))


def _tekken(version: str, special: list[str], *, thinking: bool) -> PreTrainedTokenizerFast:
    content = json.loads(data_file("mistral_common", "data/tekken_240911.json").read_text(encoding="utf-8"))
    config = content["config"]
    reserved = config["default_num_special_tokens"]
    words = [base64.b64decode(entry["token_bytes"]) for entry in content["vocab"]]
    words = words[: config["default_vocab_size"] - reserved]
    special = special + [f"<SPECIAL_{i}>" for i in range(len(special), reserved)]
    vocab = {text: i for i, text in enumerate(special)}
    tokenizer = _byte_pairs({word: reserved + i for i, word in enumerate(words)}, config["pattern"], vocab)
    _add(tokenizer, special, special=True)
    assert tokenizer.token_to_id("</s>") == 2
    template = generate_chat_template(
        spm=False,
        tokenizer_version=TokenizerVersion(version),
        image_support=False,
        audio_support=False,
        thinking_support=thinking,
        default_system_prompt=None,
        plain_thinking_support=False,
        use_special_token_variables=True,
        model_settings_fields=None,
        reasoning_effort_values=None,
        reasoning_effort_default=None,
    )
    return _fast(tokenizer, template, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _from_tiktoken(path: Path, pattern: str) -> Tokenizer:
    return _byte_pairs(TikTokenConverter.load_tiktoken_bpe(str(path)), pattern, {})


def _byte_pairs(ranks: dict[bytes, int], pattern: str, first: dict[str, int]) -> Tokenizer:
    """Return the tokenizer of a vocabulary whose ids are ranks. `first`: ids of other texts."""
    letters = bytes_to_unicode()
    vocab = first | {"".join(letters[byte] for byte in word): rank for word, rank in ranks.items()}
    merges = [("".join(letters[b] for b in left), "".join(letters[b] for b in right)) for left, right in _merges(ranks)]
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the pairs that make each word, in the order of the words, as transformers converts tiktoken's files."""
    for word in sorted(ranks, key=ranks.__getitem__):
        pairs = [(word[:i], word[i:]) for i in range(1, len(word))]
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _add(tokenizer: Tokenizer, texts: list[str], *, special: bool) -> None:
    tokens = [AddedToken(text, normalized=False, special=special) for text in texts]
    tokenizer.add_special_tokens(tokens) if special else tokenizer.add_tokens(tokens)


def _fast(tokenizer: Tokenizer, template: str, **special: str) -> PreTrainedTokenizerFast:
    build: Any = PreTrainedTokenizerFast
    fast: PreTrainedTokenizerFast = build(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
    fast.chat_template = template
    return fast


def _trl_template(name: str) -> str:
    return data_file("trl", f"chat_templates/{name}.jinja").read_text(encoding="utf-8")


def data_file(package: str, path: str) -> Path:
    """Return a file of an installed package without importing the package."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is not installed"
    return Path(spec.origin).parent / path
