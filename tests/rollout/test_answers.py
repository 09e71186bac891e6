"""The loop reads an output as the chat routes do: the environment gets the answer, not the reasoning."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.fake_engine import FakeEngine
from tests.rollout.fakes import FakeEnvironment, generated, says
from tests.server.conftest import Stack
from verl_server.errors import BadRequestError
from verl_server.models.tiny import CHAT_TEMPLATE
from verl_server.rollout.agent_loop import AgentLoop
from verl_server.rollout.answers import AnswerReader
from verl_server.rollout.episode import Limits
from verl_server.rollout.renderer import ActionError, ChatRenderer, Renderer, TextRenderer
from verl_server.rollout.trajectory import StopReason, Task, Trajectory
from verl_server.server_args import ServerArgs

THINKING = CHAT_TEMPLATE + (
    "{% if enable_thinking is defined %}{{ '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}"
)
"""It begins the reasoning, or ends it, or leaves both to the model."""
MODES: list[dict[str, Any]] = [{}, {"enable_thinking": True}, {"enable_thinking": False}]
OUTPUTS = [
    "left",
    " left\n",
    "<think>\nhm\n</think>\n\nleft",
    "\n<think></think>left ",
    "hm</think>left",
    "<think>hm",
    "hm, ",
    "<think>hm</think>",
    "<thi",
    "left <think>hm</think> right",
]


def tokenizer_with(folder: Path, template: str, *special: str) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.add_tokens(list(special), special_tokens=True)
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer(text_folder: Path) -> PreTrainedTokenizerBase:
    return tokenizer_with(text_folder, THINKING)


@pytest.fixture(scope="module")
def stacks(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str | None, Stack]]:
    """Servers with the chat template, by their setting `reasoning_parser`."""
    file = tmp_path_factory.mktemp("templates") / "thinking.jinja"
    file.write_text(THINKING)
    settings = (None, "deepseek-r1", "none")
    made = {name: Stack(text_folder, chat_template=str(file), reasoning_parser=name) for name in settings}
    yield made
    for stack in made.values():
        stack.close()


@pytest.mark.parametrize("setting", [None, "deepseek-r1", "none"])
@pytest.mark.parametrize("mode", MODES)
def test_the_answer_is_the_content_of_the_chat_routes(
    stacks: dict[str | None, Stack], tokenizer: PreTrainedTokenizerBase, setting: str | None, mode: dict[str, Any]
) -> None:
    stack = stacks[setting]
    renderer = ChatRenderer(tokenizer, **mode).for_server(setting)
    prompt = renderer.observation_tokens({"text": "where?"}, None)
    for text in OUTPUTS:
        sampled = tokenizer.encode(text, add_special_tokens=False)
        stack.scheduler.script = lambda req, sampled=sampled: sampled
        body = {"messages": [{"role": "user", "content": "where?"}], "chat_template_kwargs": mode, "max_tokens": 99}
        message = stack.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        try:
            found = renderer.action([*sampled, tokenizer.convert_tokens_to_ids("<|im_end|>")], prompt)["text"]
        except ActionError:
            assert not message["content"] and (message["reasoning_content"] or not text), text
        else:
            assert found == (message["content"] or ""), text


@pytest.mark.parametrize("make", [ChatRenderer, TextRenderer])
def test_a_reasoning_without_an_end_is_no_action(make: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    sampled = tokenizer.encode('<think>{"text": "left"}', add_special_tokens=False)
    for action_format, advice in (("text", "Reason less."), ("json", "Answer with one JSON object and nothing else.")):
        renderer: Renderer = make(tokenizer, action_format=action_format, observation_key="seen")
        with pytest.raises(ActionError, match="There is no answer, because the reasoning did not end") as caught:
            renderer.action(sampled, [])
        assert caught.value.observation["seen"].endswith(advice)
    whole: Renderer = make(tokenizer, reasoning_parser="none")
    assert whole.action(sampled, []) == {"text": '<think>{"text": "left"}'}


def test_text_that_begins_inside_the_reasoning(tokenizer: PreTrainedTokenizerBase) -> None:
    """Here the environment's text ends the prompt."""
    renderer = TextRenderer(tokenizer)
    prompt = renderer.observation_tokens({"text": "where? <think>"}, None)
    sampled = tokenizer.encode("hm</think>left", add_special_tokens=False)
    assert renderer.action(sampled, prompt) == {"text": "left"}
    assert renderer.action(sampled, prompt[:-1]) == {"text": "hm</think>left"}


def test_tags_that_are_special_tokens(text_folder: Path) -> None:
    """Mistral's are. A decoder that leaves out special tokens never shows them to the parser."""
    tokenizer = tokenizer_with(text_folder, "{{ '[THINK]' }}" + CHAT_TEMPLATE, "[THINK]", "[/THINK]", "<noise>")
    reader = AnswerReader(tokenizer, str(tokenizer.chat_template), None)
    ids = tokenizer.encode("[THINK]hm[/THINK]le<noise>ft<|im_end|>", add_special_tokens=False)
    assert reader.read(ids, []) == "left"
    assert reader.read(ids[:3], []) is None
    assert AnswerReader(tokenizer, str(tokenizer.chat_template), "none").read(ids, []) == "hmleft"


def test_the_template_that_is_rendered_decides(text_folder: Path) -> None:
    tokenizer = tokenizer_with(text_folder, CHAT_TEMPLATE)
    sampled = tokenizer.encode("<think>hm</think>left", add_special_tokens=False)
    assert ChatRenderer(tokenizer).action(sampled) == {"text": "<think>hm</think>left"}
    assert ChatRenderer(tokenizer, chat_template=THINKING).action(sampled) == {"text": "left"}
    assert ChatRenderer(tokenizer, reasoning_parser="qwen3").action(sampled) == {"text": "left"}
    assert AnswerReader(tokenizer, {"default": THINKING, "tool_use": ""}, None).read(sampled, []) == "left"
    with pytest.raises(BadRequestError, match="reasoning_parser must be one of"):
        TextRenderer(tokenizer, reasoning_parser="qwen-3")


def test_what_the_renderer_was_made_with_wins_over_the_server(tokenizer: PreTrainedTokenizerBase) -> None:
    sampled = tokenizer.encode("hm</think>left", add_special_tokens=False)
    assert TextRenderer(tokenizer).for_server("deepseek-r1").action(sampled) == {"text": "left"}
    for renderer in (
        TextRenderer(tokenizer, reasoning_parser="none").for_server("deepseek-r1"),
        TextRenderer(tokenizer),
    ):
        assert renderer.action(sampled) == {"text": "hm</think>left"}


class Thinker(FakeEngine):
    """A policy that samples texts in order, on a server with the setting `reasoning_parser`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, setting: str | None, *texts: str) -> None:
        super().__init__()
        self.server_args = ServerArgs(model_path="model", reasoning_parser=setting)
        self.scheduler_info = {"context_length": 1000}  # type: ignore[typeddict-item]
        self.left = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        self.sampled: list[int] = []

    async def _async_generate(self, body: dict[str, Any], timeout: float | None) -> Any:
        ids = self.left.pop(0)
        self.sampled += ids
        return generated(ids)

    async def async_close_session(self, session_id: str) -> None:
        pass


def play(engine: Thinker, renderer: Renderer, limits: Limits) -> tuple[Trajectory, list[Any]]:
    environment = FakeEnvironment(says("ab"), says("cd"), says("end", 1.0, True))
    with AgentLoop(engine, lambda: environment, renderer, limits=limits) as loop:
        (trajectory,) = loop.run([Task(seed=1)]).trajectories
    assert [
        token for token, mask in zip(trajectory.tokens, trajectory.loss_mask, strict=True) if mask
    ] == engine.sampled
    return trajectory, environment.actions


@pytest.mark.parametrize(
    ("setting", "mode", "begin"),
    [(None, {}, "<think>"), ("deepseek-r1", {}, ""), (None, {"enable_thinking": True}, "")],
)
def test_an_episode_of_a_policy_that_reasons(
    tokenizer: PreTrainedTokenizerBase, setting: str | None, mode: dict[str, Any], begin: str
) -> None:
    """All sampled tokens are trained. The environment gets each JSON action without the reasoning."""
    texts = (f'{begin}{{"n": 0}}</think>\n{{"n": 1}}', f"{begin}hm hm", f'{begin}so</think>```json\n{{"n": 2}}\n```')
    engine = Thinker(tokenizer, setting, *texts)
    renderer = ChatRenderer(tokenizer, action_format="json", **mode)
    trajectory, actions = play(engine, renderer, Limits(max_new_tokens=99))
    assert actions == [{"n": 1}, {"n": 2}]
    assert [turn.action for turn in trajectory.turns] == [{"n": 1}, None, {"n": 2}]
    assert "the reasoning did not end" in trajectory.turns[2].observation["text"]
    assert (trajectory.stop_reason, trajectory.reward, trajectory.turns[1].reward) == (StopReason.DONE, 1.0, None)


def test_a_reasoning_without_an_end_counts_as_a_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    engine = Thinker(tokenizer, None, "<think>hm", "<think>hm")
    trajectory, actions = play(engine, ChatRenderer(tokenizer), Limits(max_turns=2, max_new_tokens=99))
    assert (actions, len(trajectory.turns)) == ([], 2)
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.MAX_TURNS, 0.0)
