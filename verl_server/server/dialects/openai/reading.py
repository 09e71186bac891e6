"""Parses and tokenizes the bodies of completions and chats, on the event loop if they are small, otherwise in a worker.

Each `Job` does the part of one route's work that grows with the body. Chat templates are rendered in text workers only.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from verl_server.chat.session_view import NextTurn
from verl_server.errors import BadRequestError
from verl_server.sampling_params import SamplingParams
from verl_server.server.dialects.openai.fields import (
    CHAT_REFUSED,
    COMPLETION_REFUSED,
)
from verl_server.server.dialects.openai.messages import effort_options, read_openai_prompt, verbosity_options
from verl_server.server.dialects.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    at_least,
    parse_openai,
)
from verl_server.server.text.chat_prompt import ReadConversation
from verl_server.server.text.session_prompt import plan_completion, prompt_text, refuse_in_session
from verl_server.server.text.text_tools import Ids, Job, TextTools
from verl_server.web.json_body import parse_json

_DEFAULT_COMPLETION_TOKENS = 16


class ReadCompletion(msgspec.Struct, kw_only=True):
    """Result of the job `COMPLETION`."""

    request: CompletionRequest
    """The request with an empty `prompt`, and with its `max_tokens`."""
    prompts: list[Ids]
    is_single: bool
    unknown_fields: list[str]
    next: NextTurn | None = None
    """In a session: the plan of a prompt whose text follows a stored completion. None: plan the prompt by its ids."""
    prompt_text: tuple[int, bytes] | None = None
    """In a session: `NextTurn.text`."""


class ReadChat(ReadConversation, kw_only=True):
    """Result of the job `CHAT`."""

    request: ChatCompletionRequest
    """The request without the fields from which the prompt was built, and with its `max_tokens`."""


def read_completion(tools: TextTools, body: bytes) -> ReadCompletion:
    request, unknown = parse_openai(parse_json(body), CompletionRequest, COMPLETION_REFUSED)
    tools.decoder(True)  # raises without a tokenizer, which the text of the reply needs
    if request.max_tokens is None:
        request.max_tokens = _DEFAULT_COMPLETION_TOKENS
    at_least(0 if request.echo else 1, "max_tokens", request.max_tokens)
    if request.best_of not in (None, request.n):
        raise BadRequestError("best_of is not supported: use n and choose among the choices.")
    request.check_logprobs("logprobs", request.logprobs)
    if request.logprob_token_ids is not None and request.logprobs is None:
        raise BadRequestError("logprob_token_ids needs logprobs.")
    tools.limits.check_sampling(SamplingParams.parse(request.sampling_params(request.max_tokens)))
    refuse_in_session(
        tools,
        echo=request.echo,
        prompt_logprobs=request.prompt_logprobs is not None,
        truncate_prompt_tokens=request.truncate_prompt_tokens is not None,
    )
    prompts, is_single = _split_prompt(request.prompt)
    refuse_in_session(tools, **{"several prompts": len(prompts) > 1})
    tools.limits.check_samples(len(prompts), 1)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    ids: Any = tools.encode(texts, request.add_special_tokens) if texts else prompts
    keep = kept_tokens(tools, request.truncate_prompt_tokens, request.max_tokens)
    read = [tools.prompt(each, keep) for each in ids]
    request.prompt = ""
    request.encode_constraint()
    completion = ReadCompletion(request=request, prompts=read, is_single=is_single, unknown_fields=unknown)
    if tools.session is not None and texts:
        completion.next = plan_completion(tools, tools.session, texts[0])
        completion.prompt_text = prompt_text(texts[0])
    return completion


def read_chat(tools: TextTools, body: bytes) -> ReadChat:
    request, unknown = parse_openai(parse_json(body), ChatCompletionRequest, CHAT_REFUSED)
    tools.decoder(True)
    if request.max_completion_tokens is not None:
        request.max_tokens = request.max_completion_tokens
    at_least(1, "max_completion_tokens", request.max_tokens)
    request.check_logprobs("top_logprobs", request.top_logprobs)
    for name in ("top_logprobs", "logprob_token_ids"):
        if getattr(request, name) and not request.logprobs:
            raise BadRequestError(f"{name} needs logprobs=true.")
    for name in ("return_input_ids_in_sglext", "return_output_ids_in_sglext"):
        if getattr(request, name) and request.stream:
            raise BadRequestError(f"{name} is not available in a stream: use return_token_ids.")
    if request.return_sampling_mask and not request.return_meta_info:
        raise BadRequestError("return_sampling_mask needs return_meta_info=true.")
    tools.limits.check_sampling(SamplingParams.parse(request.sampling_params(request.max_tokens)))
    refuse_in_session(
        tools,
        prompt_logprobs=request.prompt_logprobs is not None,
        truncate_prompt_tokens=request.truncate_prompt_tokens is not None,
    )
    prompt = read_openai_prompt(
        tools,
        request.messages,
        template_options(request),
        tools=request.tools,
        tool_choice=request.tool_choice,
        parallel=request.parallel_tool_calls,
        constrained=request,
        input_ids=request.input_ids,
    )
    output = prompt.output
    if output.keeps_special_tokens:
        request.skip_special_tokens = False
    if not request.separate_reasoning:
        output = output.without_reasoning()
    keep = kept_tokens(tools, request.truncate_prompt_tokens, request.max_tokens)
    request.encode_constraint()
    request.messages, request.input_ids, request.tools = [], None, None
    request.chat_template_kwargs = request.chat_template = request.documents = request.tool_choice = None
    return ReadChat(
        request=request,
        prompts=[prompt.checked(tools, keep)],
        output=output,
        unknown_fields=unknown,
        unused_options=prompt.unused_options,
        next=prompt.next,
    )


def template_options(request: Any) -> dict[str, Any]:
    """Return the template's variables of a chat or of a request to tokenize one."""
    options = dict(request.chat_template_kwargs or {})
    for name in ("chat_template", "documents"):
        if (value := getattr(request, name)) is not None:
            options[name] = value
    options = effort_options(request.reasoning_effort) | verbosity_options(request.verbosity) | options
    if request.continue_final_message:
        options["continue_final_message"] = True
    # A prompt that continues a message must not begin another one, so the default of add_generation_prompt changes.
    opens_answer = request.add_generation_prompt and not options.get("continue_final_message", False)
    options.setdefault("add_generation_prompt", opens_answer)
    return options


def kept_tokens(tools: TextTools, keep: int | None, max_new_tokens: int | None) -> int | None:
    """Return the number of tokens that `truncate_prompt_tokens` keeps at the end of a prompt; None keeps all."""
    if keep is None or keep >= 1:
        return keep
    if keep != -1:
        raise BadRequestError(f"truncate_prompt_tokens must be -1 or at least 1, not {keep}.")
    return tools.bounds.room_for_prompt(max_new_tokens)


COMPLETION = Job("completion", read_completion, ReadCompletion)
CHAT = Job("chat", read_chat, ReadChat)


def _split_prompt(prompt: str | list[Any]) -> tuple[list[str | list[int]], bool]:
    """Return (prompts, True if the body has one prompt and not a list) for any of the four forms of `prompt`."""
    if isinstance(prompt, str):
        return [prompt], True
    if not prompt:
        raise BadRequestError("prompt cannot be empty.")
    kinds = Counter(map(type, prompt))
    if len(kinds) > 1:
        raise BadRequestError("prompt mixes strings, token ids and lists of them.")
    return ([prompt], True) if int in kinds else (prompt, False)
