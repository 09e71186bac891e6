"""The cut shows each template's own glue between a stored turn and new messages, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chat.session_fakes import END_TOKENS, TEMPLATES, ToyTokens, result, user
from verl_server.chat.cut import EndTokens, after_prompt, extension, opening_length, opening_text, with_call_ids
from verl_server.chat.output import OutputFormat
from verl_server.chat.session_view import ReplyFacts
from verl_server.chat.templates import ChatTemplates

TOKENS = ToyTokens()
CALLS = [("abcdefgh1", "add"), ("abcdefgh2", "look")]
OPEN = "<|im_start|>assistant\n"


class Cut:
    """One template, and the texts that its cuts show."""

    def __init__(self, name: str, source: str | None = None) -> None:
        self.source = source or TEMPLATES[name]
        self._templates = ChatTemplates(self.source, [], {})
        ids = [TOKENS.id(text) for text in END_TOKENS[name]]
        self.end_token = ids[0]
        self.ends = EndTokens(ids, lambda token: TOKENS.text([token]))
        self.renders: list[Any] = []

    def render(self, messages: Any, options: Any) -> str:
        self.renders.append((messages, options))
        return self._templates.render(messages, options)[0]

    def text(self, new: list[dict[str, Any]], *, calls: Any = (), end: str | None = "", **more: Any) -> str | None:
        """Return the text of the ids behind a turn that ended with `end` ("": the usual end token)."""
        token = -1 if end is None else TOKENS.id(end) if end else self.end_token
        options = {"add_generation_prompt": True, "tools": [{"name": "add"}], **more.pop("options", {})}
        format = OutputFormat.of(self.source)
        cut = extension(facts(token, calls, **more), new, options, self.render, TOKENS.encode, format, self.ends)
        return None if cut is None else TOKENS.text(cut.ids)


def facts(end_token: int = -1, calls: Any = (), in_reasoning: bool = False) -> ReplyFacts:
    return ReplyFacts(
        turn=0,
        parent=-1,
        prompt_tokens=3,
        output_tokens=3,
        generation_prompt=0,
        end_token=end_token,
        in_reasoning=in_reasoning,
        delivered=True,
        calls=list(calls),
        options=b"",
    )


def tool(call_id: str, content: str = "3") -> dict[str, Any]:
    return result({"id": call_id}, content)


@pytest.mark.parametrize(
    ("name", "new", "calls", "expected"),
    [
        ("qwen", [user("b")], (), f"\n<|im_start|>user\nb<|im_end|>\n{OPEN}"),
        (
            "qwen",
            [tool("abcdefgh1"), tool("abcdefgh2", "4")],
            CALLS,
            "\n<|im_start|>user<tool_response>\n3\n</tool_response><tool_response>\n4\n</tool_response><|im_end|>\n"
            + OPEN,
        ),
        ("llama", [user(" b ")], (), "<|start|>user<|end|>\n\nb<|eot_id|><|start|>assistant<|end|>\n\n"),
        (
            "llama",
            [tool("abcdefgh1")],
            CALLS[:1],
            '<|start|>ipython<|end|>\n\n"3"<|eot_id|><|start|>assistant<|end|>\n\n',
        ),
        # Two calls, which the template refuses: it is shown the one that the first result answers.
        ("llama", [tool("abcdefgh2")], CALLS, '<|start|>ipython<|end|>\n\n"3"<|eot_id|><|start|>assistant<|end|>\n\n'),
        ("mistral", [user("b")], (), "[INST] b[/INST]"),
        (
            "mistral",
            [tool("abcdefgh2")],
            CALLS,
            '[TOOL_RESULTS]{"content": "3", "call_id": "abcdefgh2"}[/TOOL_RESULTS]',
        ),
        ("glm", [user("b")], (), "\nb<|assistant|>\n"),
        ("plain", [user("b")], (), "\nUser: b\nAssistant:"),
        ("plain", [user("b")], CALLS, "\nUser: b\nAssistant:"),  # the template leaves calls out
    ],
)
def test_what_follows_a_turn(name: str, new: list[dict[str, Any]], calls: Any, expected: str) -> None:
    assert Cut(name).text(new, calls=calls) == expected


def test_tools_and_system_are_not_rendered_again() -> None:
    for name in ("qwen", "llama", "mistral", "glm"):
        cut = Cut(name)
        cut.text([user("b")], options={"enable_thinking": True} if name == "qwen" else {})
        assert all("tools" not in options for _, options in cut.renders)
        assert cut.renders[0][0][0] == user(".")


def test_an_end_token_that_the_turn_lacks_is_added() -> None:
    cut = Cut("qwen")
    follows = f"\n<|im_start|>user\nb<|im_end|>\n{OPEN}"
    assert cut.text([user("b")], end=None) == "<|im_end|>" + follows
    assert cut.text([user("b")], end="<|endoftext|>") == "<|im_end|>" + follows
    assert cut.text([user("b")], end=None, in_reasoning=True) == "</think><|im_end|>" + follows
    # The end token of GLM is the tag of the next role: another role follows than the policy expected.
    assert Cut("glm").text([tool("abcdefgh1")], calls=CALLS[:1], end="<|user|>") == "<|observation|>\n3<|assistant|>\n"
    assert Cut("glm").text([tool("abcdefgh1")], calls=CALLS[:1], end="<|observation|>") == "\n3<|assistant|>\n"


@pytest.mark.parametrize("content", ["<|im_end|>", "</s>", "cut-here-0.", "cut-here-0.<|im_end|>cut-here-1."])
@pytest.mark.parametrize("name", ["qwen", "mistral", "plain"])
def test_a_callers_text_is_no_end(name: str, content: str) -> None:
    found = Cut(name).text([user(f"a {content} b")])
    plain = Cut(name).text([user("PLACE")])
    assert found is not None and plain is not None
    assert found == plain.replace("PLACE", f"a {content} b")


def test_an_answer_without_new_messages() -> None:
    assert Cut("qwen").text([]) == f"\n{OPEN}"
    assert (
        Cut("qwen").text([user("b")], options={"add_generation_prompt": False}) == "\n<|im_start|>user\nb<|im_end|>\n"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('never') }}",
        "{% for m in messages %}{{ m.role }}{% endfor %}",  # the mark is lost
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",  # and doubled
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
    ],
)
def test_a_template_without_a_cut(source: str) -> None:
    assert Cut("plain", source).text([user("b")]) is None
    assert Cut("plain", source).text([tool("abcdefgh1")], calls=CALLS) is None


def test_a_tokenizer_that_hides_the_end_token() -> None:
    cut = Cut("qwen")
    options = {"add_generation_prompt": True}
    encode = lambda text: [7, *TOKENS.encode(text)]  # noqa: E731 (a tokenizer that puts a token before each text)
    format = OutputFormat.of(cut.source)
    assert extension(facts(cut.end_token), [user("b")], options, cut.render, encode, format, cut.ends) is None


def test_what_follows_a_prompt() -> None:
    edited = [{"role": "assistant", "content": "x"}, user("b")]
    for name, expected in {
        "qwen": f"<|im_start|>assistant\nx<|im_end|>\n<|im_start|>user\nb<|im_end|>\n{OPEN}",
        "mistral": " x</s>[INST] b[/INST]",
        "llama": "<|start|>assistant<|end|>\n\nx<|eot_id|><|start|>user<|end|>\n\nb<|eot_id|>"
        "<|start|>assistant<|end|>\n\n",
    }.items():
        cut = Cut(name)
        added = after_prompt(edited, {"add_generation_prompt": True, "tools": [1]}, cut.render, TOKENS.encode)
        assert added is not None and TOKENS.text(added.ids) == expected
    # Here the tokenizer joins the end of the prompt with what follows.
    joins = Cut("plain", "{% for m in messages %}{{ m.content }}:{% endfor %}")
    assert after_prompt([{"role": "assistant", "content": " x"}], {}, joins.render, TOKENS.encode) is None


def test_the_opening_of_an_answer() -> None:
    cut = Cut("qwen")
    opening = opening_text({"add_generation_prompt": True}, cut.render)
    assert opening == OPEN
    assert opening_text({"add_generation_prompt": False}, cut.render) == ""
    assert opening_text({"add_generation_prompt": True}, Cut("mistral").render) == ""
    assert opening_text({}, Cut("qwen", "{{ raise_exception('x') }}").render) is None
    prompt = TOKENS.encode(f"a<|im_end|>\n{OPEN}")
    count = opening_length(prompt, opening, TOKENS.encode, cut.ends)
    assert TOKENS.text(prompt[-count:]) == OPEN
    assert opening_length(prompt[:-1], opening, TOKENS.encode, cut.ends) == -1
    assert opening_length(prompt, None, TOKENS.encode, cut.ends) == -1
    assert opening_length(prompt, "", TOKENS.encode, cut.ends) == 0


def test_results_get_the_sampled_ids_of_their_calls() -> None:
    reply = {"role": "assistant", "tool_calls": [{"id": "x"}, {"id": "y"}]}
    changed = with_call_ids(facts(calls=CALLS), reply, [tool("y"), tool("z"), user("b")])
    assert changed == [tool("abcdefgh2"), tool("z"), user("b")]
    assert with_call_ids(facts(calls=CALLS), None, [tool("y")]) == [tool("y")]
