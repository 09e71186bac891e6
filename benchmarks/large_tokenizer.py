"""A byte-level BPE tokenizer with a real vocabulary's size, made without a download.

The cost of detokenization, of templates and of grammars' masks depends on the size of the vocabulary, which the byte
tokenizer of tests does not have. Its tokens are bytes, pairs of letters, and words of three and four letters, half of
them with a leading space. Random weights generate random tokens, so the text is no language.
"""

from __future__ import annotations

import itertools
import string

from transformers import PreTrainedTokenizerFast

from verl_server.models.tiny import NUM_BYTE_TOKENS, byte_level_tokenizer

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
    """Return a tokenizer with `vocab_size` tokens, which begin with those of `byte_tokenizer`."""
    letters = string.ascii_lowercase
    pairs = [(_SPACE, a) for a in letters] + list(itertools.product(letters, letters))
    starts = [a + b for a, b in pairs]
    longer = itertools.chain.from_iterable(
        itertools.product([s for s in words if s.startswith(_SPACE) == spaced], letters)
        for words in (starts, [s + a for s in starts for a in letters])
        for spaced in (True, False)
    )
    merges = list(itertools.islice(itertools.chain(pairs, longer), vocab_size - NUM_BYTE_TOKENS))
    return byte_level_tokenizer([a + b for a, b in merges], merges, chat_template=CHAT_TEMPLATE, split_words=True)
