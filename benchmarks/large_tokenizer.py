"""A byte-level BPE tokenizer with a real vocabulary's size, made without a download.

The cost of detokenization, of templates and of grammars' masks depends on the size of the vocabulary, which the byte
tokenizer of tests does not have. Its tokens are bytes, pairs of letters, and words of three and four letters, half of
them with a leading space. Random weights generate random tokens, so the text is no language.
"""

from __future__ import annotations

import itertools
import string
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from verl_server.models.tiny import SPECIAL_TOKENS

_SPACE = "Ġ"
"""The character that stands for a space in the byte-level alphabet."""
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n# Tools\n<tools>\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    '</tools>\nReturn <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] %}{{ message['content'] }}{% endif %}"
    "{% for call in message.get('tool_calls') or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template in the style of Qwen and Hermes, with tools."""


def large_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with `vocab_size` tokens, the special tokens of `byte_tokenizer` among them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *alphabet]
    merges: list[tuple[str, str]] = []
    letters = string.ascii_lowercase
    pairs = [(_SPACE, a) for a in letters] + list(itertools.product(letters, letters))
    starts = [a + b for a, b in pairs]
    longer = itertools.chain.from_iterable(
        itertools.product([s for s in words if s.startswith(_SPACE) == spaced], letters)
        for words in (starts, [s + a for s in starts for a in letters])
        for spaced in (True, False)
    )
    for left, right in itertools.islice(itertools.chain(pairs, longer), max(0, vocab_size - len(tokens))):
        merges.append((left, right))
        tokens.append(left + right)
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens[:vocab_size])}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    build: Any = PreTrainedTokenizerFast  # because transformers is only partly typed
    fast: PreTrainedTokenizerFast = build(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
