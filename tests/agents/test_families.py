"""The families' tokenizers and templates give what the packages' own code gives."""

from __future__ import annotations

import random
from collections.abc import Callable

from families import Family, data_file
from llama_models.llama3.tokenizer import Tokenizer as LlamaTokenizer
from mistral_common.protocol.instruct.messages import AssistantMessage, SystemMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from test_random_conversations import PIECES

TEXTS = [
    "".join(piece for piece in random.Random(seed).choices(PIECES, k=12) if not piece.startswith(("<", "[")))
    for seed in range(200)
]


def test_llama_encodes_as_its_own_package(family: Callable[[str], Family]) -> None:
    theirs = LlamaTokenizer(data_file("llama_models", "llama3/tokenizer.model"))
    ours = family("llama3").tokenizer
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, bos=False, eos=False), text


def test_tekken_encodes_and_renders_as_its_own_package(family: Callable[[str], Family]) -> None:
    theirs = MistralTokenizer.from_file(str(data_file("mistral_common", "data/tekken_240911.json")))
    ours = family("mistral").tokenizer
    for text in TEXTS:
        raw = theirs.instruct_tokenizer.tokenizer
        assert ours.encode(text, add_special_tokens=False) == raw.encode(text, bos=False, eos=False), text
        messages = [("system", "Be brief."), ("user", text), ("assistant", "Yes."), ("user", "Why?")]
        kinds = {"system": SystemMessage, "user": UserMessage, "assistant": AssistantMessage}
        request = ChatCompletionRequest(messages=[kinds[role](content=content) for role, content in messages])
        rendered = ours.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages], return_dict=False
        )
        assert rendered == theirs.encode_chat_completion(request).tokens, text
