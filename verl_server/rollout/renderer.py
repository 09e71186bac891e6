"""Renderers: convert an environment's observations into tokens, and sampled tokens into actions.

An `Episode` calls its renderer for each observation and each action. An observation becomes tokens once, when it
arrives. Sampled tokens are never tokenized again. `AnswerReader` separates the sampled text from the policy's
reasoning, and `ActionReader` reads it as an action.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, Self

import orjson
from referencing.exceptions import Unresolvable
from transformers import PreTrainedTokenizerBase

from verl_server.errors import BadRequestError, VerlServerError
from verl_server.rollout.answers import AnswerReader
from verl_server.rollout.environment import Action, EnvError, Observation
from verl_server.rollout.environments.action_schema import ActionSchema

ActionFormat = Literal["text", "json"]
"""The form in which the policy writes an action: `text` is the value of one key, `json` is the whole action as a JSON
object."""

_FENCED = re.compile(r"```(?:json)?\s*\n(.*)\n\s*```", re.DOTALL)


class ActionError(VerlServerError):
    """The policy's text is no action. The episode continues with `observation`, which states the reason."""

    def __init__(self, message: str, observation: Observation) -> None:
        super().__init__(message)
        self.observation = observation


class Renderer(Protocol):
    """The interface between an environment's messages and the policy's tokens."""

    def observation_tokens(self, observation: Observation, last_token: int | None) -> list[int]:
        """Return the tokens to append to the trajectory. `last_token` ended the previous turn (None: no turn yet)."""

    def action(self, token_ids: list[int], prompt_ids: list[int]) -> Action:
        """Return the action that the sampled tokens of a turn express. `prompt_ids` are the tokens before them.

        Raise ActionError if they express none.
        """


class ActionReader:
    """Converts the policy's text into an action of the environment, in one `ActionFormat`."""

    def __init__(
        self,
        action_format: ActionFormat,
        action_key: str,
        observation_key: str,
        action_schema: dict[str, Any] | None,
    ) -> None:
        if action_format not in ("text", "json"):
            raise BadRequestError(f"action_format must be 'text' or 'json', not {action_format!r}.")
        self._format = action_format
        self._action_key = action_key
        self._observation_key = observation_key
        checked = action_schema is not None and action_format == "json"
        self._schema = ActionSchema("environment", action_schema) if checked else None
        required = (action_schema or {}).get("required") or []
        if action_format == "text" and any(key != action_key for key in required):
            raise BadRequestError(
                f"The environment's actions need the keys {required}, and the policy's text is sent as {action_key!r} "
                "only. Set action_key (--action-key) if one key is needed, or action_format='json' "
                "(--action-format json) if there are more."
            )

    def read(self, text: str | None) -> Action:
        """Return the action. Raise ActionError for JSON that is no object, or that violates the environment's schema.

        JSON may be in a fenced block. `text` is None if the policy did not end its reasoning, which is an ActionError
        in each format. Raise EnvError if the schema refers to a document of another host.
        """
        if text is None:
            raise self._refusal("There is no answer, because the reasoning did not end. Reason less.")
        if self._format == "text":
            return {self._action_key: text}
        fenced = _FENCED.fullmatch(text.strip())
        try:
            action = orjson.loads(fenced[1] if fenced else text)
        except orjson.JSONDecodeError as error:
            raise self._refusal(f"The action is not JSON: {error}.") from None
        if not isinstance(action, dict):
            raise self._refusal(f"The action must be a JSON object, not {type(action).__name__}.")
        if self._schema is None:
            return action
        try:
            violation = self._schema.violation(action)
        except RecursionError:
            violation = "The action is nested too deeply."
        except Unresolvable as error:
            raise EnvError(f"The schema of the environment's actions cannot be used: {error}") from error
        if violation is not None:
            raise self._refusal(violation)
        return action

    def _refusal(self, fault: str) -> ActionError:
        keys = ", ".join(self._schema.schema.get("properties", {})) if self._schema is not None else ""
        advice = f" Answer with one JSON object{f' with the keys {keys}' if keys else ''} and nothing else."
        message = fault + (advice if self._format == "json" else "")
        return ActionError(message, {self._observation_key: message})


class TokenizerRenderer:
    """The common base of `TextRenderer` and `ChatRenderer`: the action is in the answer, without the reasoning."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | Mapping[str, str] | None,
        reasoning_parser: str | None,
        actions: ActionReader,
    ) -> None:
        """`template` and `reasoning_parser` define how the policy writes its reasoning (`AnswerReader`)."""
        self._tokenizer = tokenizer
        self._template = template
        self._parser = reasoning_parser
        self._actions = actions
        self._answers = AnswerReader(tokenizer, template, reasoning_parser)

    def for_server(self, reasoning_parser: str | None) -> Self:
        """Return this renderer with a server's setting. The setting is used if the renderer has none of its own."""
        if self._parser is not None or reasoning_parser is None:
            return self
        other = copy.copy(self)
        other._answers = AnswerReader(self._tokenizer, self._template, reasoning_parser)
        return other

    def action(self, token_ids: list[int], prompt_ids: Sequence[int] = ()) -> Action:
        """Return the action as `Renderer.action` does. An answer whose reasoning did not end is no action."""
        return self._actions.read(self._answers.read(token_ids, prompt_ids))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


class TextRenderer(TokenizerRenderer):
    """Renders plain text. An observation's tokens follow an action's with nothing between them."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        observation_key: str = "text",
        action_key: str = "text",
        action_format: ActionFormat = "text",
        action_schema: dict[str, Any] | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        """Send the policy's text as `{action_key: text}`. In the format "json" it is the action, a JSON object.

        JSON that violates `action_schema`, the environment's JSON schema, is not sent. The reasoning before the answer
        is not sent. `reasoning_parser` is its format, as in the server's setting. The default is the setting of the
        server that `AgentLoop` generates with, or else what the chat template shows. "none" sends the whole text.
        """
        actions = ActionReader(action_format, action_key, observation_key, action_schema)
        super().__init__(tokenizer, tokenizer.chat_template, reasoning_parser, actions)
        self._observation_key = observation_key

    def observation_tokens(self, observation: Observation, last_token: int | None) -> list[int]:
        """Return the tokens of the observation's text. The first observation follows the BOS token, if there is one."""
        text = observation_text(observation, self._observation_key)
        ids = self._encode(text)
        bos = self._tokenizer.bos_token_id
        return [bos, *ids] if last_token is None and bos is not None else ids


class ChatRenderer(TokenizerRenderer):
    """Renders the model's chat template: observations are user messages, actions are assistant messages.

    A later observation is rendered after a placeholder conversation, and everything up to the placeholder's answer is
    cut off. The rest begins with the template's marks between an answer and the next user message, and contains no
    sampled token.
    """

    _PLACEHOLDER = "\u2063placeholder\u2063"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system: str | None = None,
        observation_key: str = "text",
        action_key: str = "text",
        action_format: ActionFormat = "text",
        action_schema: dict[str, Any] | None = None,
        reasoning_parser: str | None = None,
        **template_options: Any,
    ) -> None:
        """`template_options` are arguments of the chat template. For the others see `TextRenderer`."""
        if not tokenizer.chat_template:
            raise BadRequestError("This tokenizer has no chat template; use TextRenderer.")
        template = template_options.get("chat_template") or tokenizer.chat_template
        actions = ActionReader(action_format, action_key, observation_key, action_schema)
        super().__init__(tokenizer, template, reasoning_parser, actions)
        self._system = [{"role": "system", "content": system}] if system else []
        self._observation_key = observation_key
        self._options = template_options

    def observation_tokens(self, observation: Observation, last_token: int | None) -> list[int]:
        """Return the tokens of a user message, with the template's marks around it, without a repeated `last_token`."""
        user = {"role": "user", "content": observation_text(observation, self._observation_key)}
        if last_token is None:
            return self._encode(self._render([*self._system, user]))
        before = [{"role": "user", "content": "."}, {"role": "assistant", "content": self._PLACEHOLDER}]
        text = self._render([*self._system, *before, user])
        ids = self._encode(text[text.rindex(self._PLACEHOLDER) + len(self._PLACEHOLDER) :])
        # The template ends an answer with the token that ended the sampling, which is in the trajectory already.
        return ids[1:] if ids and ids[0] == last_token else ids

    def _render(self, messages: list[dict[str, str]]) -> str:
        return str(
            self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **self._options)
        )


def observation_text(observation: Observation, key: str) -> str:
    """Return the text under `key` in an observation. Raise BadRequestError if there is none."""
    value = observation.get(key)
    if not isinstance(value, str):
        raise BadRequestError(
            f"The observation has no text under {key!r}; its keys: {list(observation)}. Name one of them "
            "with observation_key (--observation-key)."
        )
    return value
