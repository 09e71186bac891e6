"""Renderers: from an environment's observations to tokens, and from sampled tokens to actions.

An `Episode` calls its renderer for each observation and each action. An observation becomes tokens once, when it
arrives. Sampled tokens are never tokenized again.
"""

from __future__ import annotations

from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from verl_server.errors import BadRequestError
from verl_server.rollout.environment import Action, Observation


class Renderer(Protocol):
    def observation_tokens(self, observation: Observation, last_token: int | None) -> list[int]:
        """Tokens to append to the trajectory. `last_token` ended the previous turn (None: there is no turn yet)."""
        ...

    def action(self, token_ids: list[int]) -> Action:
        """The action that the sampled tokens of a turn stand for."""
        ...


class TextRenderer:
    """Renders plain text. An observation's tokens follow an action's with nothing between them."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, observation_key: str = "text", action_key: str = "text"
    ) -> None:
        self._tokenizer = tokenizer
        self._observation_key = observation_key
        self._action_key = action_key

    def observation_tokens(self, observation: Observation, last_token: int | None) -> list[int]:
        text = observation_text(observation, self._observation_key)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        bos = self._tokenizer.bos_token_id
        return [bos, *ids] if last_token is None and bos is not None else ids

    def action(self, token_ids: list[int]) -> Action:
        return {self._action_key: self._tokenizer.decode(token_ids, skip_special_tokens=True)}


class ChatRenderer:
    """Renders the model's chat template: observations are user messages, actions are assistant messages.

    A later observation is rendered after a placeholder conversation, of which everything up to the placeholder's answer
    is cut off. What remains begins with the template's marks between an answer and the next user message, and contains
    no sampled token.
    """

    _PLACEHOLDER = "\u2063placeholder\u2063"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system: str | None = None,
        observation_key: str = "text",
        action_key: str = "text",
        **template_options: Any,
    ) -> None:
        if not tokenizer.chat_template:
            raise BadRequestError("This tokenizer has no chat template; use TextRenderer.")
        self._tokenizer = tokenizer
        self._system = [{"role": "system", "content": system}] if system else []
        self._observation_key = observation_key
        self._action_key = action_key
        self._options = template_options

    def observation_tokens(self, observation: Observation, last_token: int | None) -> list[int]:
        user = {"role": "user", "content": observation_text(observation, self._observation_key)}
        if last_token is None:
            return self._encode(self._render([*self._system, user]))
        before = [{"role": "user", "content": "."}, {"role": "assistant", "content": self._PLACEHOLDER}]
        text = self._render([*self._system, *before, user])
        ids = self._encode(text[text.rindex(self._PLACEHOLDER) + len(self._PLACEHOLDER) :])
        # The template ends an answer with the token that ended the sampling, which is in the trajectory already.
        return ids[1:] if ids and ids[0] == last_token else ids

    def action(self, token_ids: list[int]) -> Action:
        return {self._action_key: self._tokenizer.decode(token_ids, skip_special_tokens=True)}

    def _render(self, messages: list[dict[str, str]]) -> str:
        return str(
            self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **self._options)
        )

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def observation_text(observation: Observation, key: str) -> str:
    """The text under `key` in an observation. Raises BadRequestError if there is none."""
    value = observation.get(key)
    if not isinstance(value, str):
        raise BadRequestError(
            f"The observation has no text under {key!r}; its keys: {list(observation)}. Set observation_key."
        )
    return value
