"""Between an environment's words and the policy's tokens.

An `Episode` asks its renderer for the tokens of each observation and for the action that sampled tokens mean.
Observations become tokens once, in the order they arrive; what the policy sampled stays as sampled.
"""

from __future__ import annotations

from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from verl_server.errors import BadRequestError
from verl_server.rollout.environment import Action, Observation


class Renderer(Protocol):
    def observation_tokens(self, observation: Observation, last_token: int | None) -> list[int]:
        """Tokens to append. `last_token` ended the previous turn; None for the first observation."""
        ...

    def action(self, token_ids: list[int]) -> Action:
        """What the sampled tokens of a turn tell the environment."""
        ...


class TextRenderer:
    """Plain text: the observation's tokens follow the action's, with nothing between them."""

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
    """The model's chat template: observations are user messages, actions are assistant messages.

    Later observations are rendered after a stand-in conversation and cut off behind the stand-in's answer, so
    that the template's closing and opening marks are kept and the sampled tokens are not rendered again.
    """

    _STAND_IN = "\u2063stand-in\u2063"

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
        before = [{"role": "user", "content": "."}, {"role": "assistant", "content": self._STAND_IN}]
        text = self._render([*self._system, *before, user])
        ids = self._encode(text[text.rindex(self._STAND_IN) + len(self._STAND_IN) :])
        # The template closes the answer with the token that also ended the sampling, if it was not cut short.
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
    """The observation's text; other environments' observations name it differently."""
    value = observation.get(key)
    if not isinstance(value, str):
        raise BadRequestError(
            f"The observation has no text under {key!r}; its keys: {list(observation)}. Set observation_key."
        )
    return value
