"""`AnswerReader`: the answer in the tokens that a policy sampled, without the reasoning before it.

Renderers call it for each action. The chat routes separate reasoning and content with the same parser, which is chosen
by the same rule: the server's setting `reasoning_parser`, or else the source of the chat template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from verl_server.chat.output import OutputFormat, joined

_PROMPT_END = 64
"""Tokens at the end of the prompt in which the tags of the reasoning are looked for."""


class AnswerReader:
    """A reader of token ids as the text of an answer."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | Mapping[str, str] | None,
        reasoning_parser: str | None,
    ) -> None:
        """`template` is the chat template, or several by name, of which "default" is used.

        `reasoning_parser` is a value of the server's setting: None detects the format of the reasoning in the template,
        "none" leaves the reasoning in the answer. Raise BadRequestError for an unknown name.
        """
        source = template.get("default") if isinstance(template, Mapping) else template
        self._format = OutputFormat.of(source, reasoning_parser=reasoning_parser)
        self._tokenizer = tokenizer
        tags = self._format.tags(tools=False)
        added = tokenizer.added_tokens_decoder
        self._left_out = {id for id, token in added.items() if token.special and token.content not in tags}

    def read(self, token_ids: Sequence[int], prompt_ids: Sequence[int]) -> str | None:
        """Return the answer, without special tokens; None if the tokens end inside the reasoning.

        `prompt_ids` are the tokens before the answer. The prompt may begin the reasoning, or end it.
        """
        # Some tokenizers have the tags as special tokens, which the parser must see.
        text = self._decoded([id for id in token_ids if id not in self._left_out])
        prompt = self._decoded(prompt_ids[-_PROMPT_END:])
        format = self._format.after(prompt)
        if format.reasoning_format is None:
            return text
        parser = format.parser(tools=False, thinking_open=format.thinking_open(prompt))
        deltas = parser.push(text)
        return None if parser.in_reasoning else joined([*deltas, *parser.finish()]).content

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
