"""Chat templates and variables that a request may choose; templates render as transformers renders them."""

from __future__ import annotations

from typing import Any

import pytest

from verl_server.chat.templates import ChatTemplate, ChatTemplates
from verl_server.errors import BadRequestError
from verl_server.models.tiny import CHAT_TEMPLATE, byte_tokenizer

ASK: list[dict[str, Any]] = [{"role": "user", "content": "What is 2 < 3?"}]
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    *ASK,
    {"role": "assistant", "content": " Yes. ", "name": None, "reasoning": "hm"},
]

TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    "trims": "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}",
    "namespace": """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'system' %}{% continue %}{% endif %}
{{ bos_token if loop.first }}{{ m.role }}{{ '*' if loop.index0 == ns.last }}: {{ m.content }}
    {%- if m.name is defined %} ({{ m.name }}){% endif %}
{% endfor %}""",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content or '' }}|{{ m.thinking or '' }}|{{ m.content }}"
    "{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ eos_token }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}",
    "tools": "{% if tools %}tools{% else %}none{% endif %}{{ documents is none }}"
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "variable": "{% if enable_thinking is defined and enable_thinking is false %}<no>{% endif %}"
    "{{ messages[-1].content }}",
}


def templates(default: str | None = CHAT_TEMPLATE, *allowed: str) -> ChatTemplates:
    return ChatTemplates(default, allowed, byte_tokenizer().special_tokens_map)


@pytest.mark.parametrize("name", list(TEMPLATES))
@pytest.mark.parametrize(
    ("messages", "options"),
    [
        (ASK, {"add_generation_prompt": True}),
        (TALK, {"add_generation_prompt": False}),
        (TALK, {"continue_final_message": True, "add_generation_prompt": False}),
        (ASK, {"enable_thinking": False, "add_generation_prompt": False}),
    ],
)
def test_renders_what_transformers_renders(name: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> None:
    if name == "json" and "continue_final_message" in options:
        pytest.skip("a template that quotes its messages has no open end")
    tokenizer = byte_tokenizer()
    expected = tokenizer.apply_chat_template(messages, chat_template=TEMPLATES[name], tokenize=False, **options)
    assert templates(TEMPLATES[name]).render(messages, options)[0] == expected


def test_a_template_of_the_caller_is_refused() -> None:
    for given in ("{{ messages }}", CHAT_TEMPLATE + " ", 5, [CHAT_TEMPLATE]):
        with pytest.raises(BadRequestError, match="--allowed-chat-templates"):
            templates(CHAT_TEMPLATE, "{{ 1 }}").render(ASK, {"chat_template": given})


def test_a_listed_template_and_the_models_own_are_accepted() -> None:
    some = templates(CHAT_TEMPLATE, "listed")
    assert some.render(ASK, {"chat_template": "listed"})[0] == "listed"
    assert some.render(ASK, {"chat_template": CHAT_TEMPLATE}) == some.render(ASK, {})


def test_variables_are_those_that_the_template_reads() -> None:
    assert ChatTemplate(TEMPLATES["variable"]).variables == {"enable_thinking"}
    assert ChatTemplate(TEMPLATES["namespace"]).variables == {"bos_token"}
    some = templates("{% if style == 'short' %}{{ messages[0].content }}{% endif %}")
    assert some.render(ASK, {"style": "short"}) == ("What is 2 < 3?", [])
    with pytest.raises(BadRequestError, match=r"does not use `stile`, `messages`; it uses .*style"):
        some.render(ASK, {"stile": "short", "messages": []})


def test_enable_thinking_is_accepted_anywhere() -> None:
    assert templates().render(ASK, {"enable_thinking": False})[1] == ["enable_thinking"]
    assert templates(TEMPLATES["variable"]).render(ASK, {"enable_thinking": False}) == ("<no>What is 2 < 3?", [])


@pytest.mark.parametrize(
    ("template", "options", "says"),
    [
        (None, {}, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", {}, "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", {}, "refused the messages"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", {}, "name must begin with a letter"),
        ("{{ messages[7].content.x }}", {}, "refused the messages"),
        ("{% for %}", {}, "line 1"),
        (CHAT_TEMPLATE, {"add_generation_prompt": "yes"}, "add_generation_prompt must be true or false"),
        (CHAT_TEMPLATE, {"add_generation_prompt": True, "continue_final_message": True}, "exclude each other"),
        ("hello", {"continue_final_message": True}, "changes the last message"),
    ],
)
def test_faults_are_bad_requests(template: str | None, options: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequestError, match=says):
        templates(template).render(ASK, options)


def test_several_templates_by_name() -> None:
    some = ChatTemplates({"default": "a", "tool_use": "b"}, (), {})
    assert (some.render(ASK, {})[0], some.render(ASK, {"chat_template": "b"})[0]) == ("a", "b")


def test_tools_and_documents_are_given_to_templates_that_read_them() -> None:
    some = templates("{{ tools | length if tools }}{{ documents | length if documents }}{{ messages[0].role }}")
    assert some.render(ASK, {"tools": [{}, {}], "documents": [{}]})[0] == "21user"
    assert some.render(ASK, {"tools": [], "documents": None}) == ("user", [])
    plain = "{{ messages[0].content }}"
    for name in ("tools", "documents"):
        with pytest.raises(BadRequestError, match=f"{name}: the chat template does not use `{name}`.*--chat-template"):
            templates(plain).render(ASK, {name: [{}]})
        assert templates(plain).render(ASK, {name: []}) == templates(plain).render(ASK, {})


def test_a_template_for_tools_is_used_with_tools() -> None:
    named = ChatTemplates({"default": "plain", "tool_use": "{{ tools | length }}"}, (), {})
    assert named.render(ASK, {})[0] == "plain" and named.render(ASK, {"tools": [{}]})[0] == "1"
    assert named.choose({"tools": [{}]}).source == "{{ tools | length }}" and named.choose({}).source == "plain"


CALLS = [
    *ASK,
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "get", "arguments": {"city": "Rome"}}}]},
]
EACH_CALL = "{% for c in messages[-1].tool_calls %}CALL{% endfor %}"


def test_arguments_are_an_object_or_the_text_that_a_template_expects() -> None:
    as_object = templates(
        EACH_CALL.replace("CALL", "{{ c.function.arguments | tojson }}{{ c.function.arguments.city }}")
    )
    assert as_object.render(CALLS, {})[0] == '{"city": "Rome"}Rome'
    as_text = templates(EACH_CALL.replace("CALL", "{{ '>' + c['function']['arguments'] }}"))
    assert as_text.render(CALLS, {})[0] == '>{"city": "Rome"}'
    wrong = templates(EACH_CALL.replace("CALL", "{{ raise_exception('No calls.') }}"))
    with pytest.raises(BadRequestError, match="No calls"):
        wrong.render(CALLS, {})


def test_an_empty_content_beside_calls_is_null_for_templates_that_test_for_null() -> None:
    for test in ("messages[-1]['content'] is none", "messages[-1].content is not none"):
        shown = templates("{% if TEST %}a{% else %}b{% endif %}".replace("TEST", test)).render(CALLS, {})[0]
        assert shown == ("a" if "not" not in test else "b")
        assert templates("{% if TEST %}a{% else %}b{% endif %}".replace("TEST", test)).render(ASK, {})[0] != shown
    assert templates("{{ messages[-1].content + '.' }}").render(CALLS, {})[0] == "."


@pytest.mark.parametrize(
    "source",
    [
        "{" * 200_000,
        "{{" + "(" * 50_000 + "1" + ")" * 50_000 + "}}",
        "{% for x in y %}" * 3000 + "{% endfor %}" * 3000,
        "{% for x in y %}" * 25 + "{% endfor %}" * 25,
        "{{" + "9" * 5000 + "}}",
    ],
    ids=["braces", "parentheses", "3000 loops", "25 loops", "a long number"],
)
def test_a_template_that_cannot_be_compiled_is_refused(source: str) -> None:
    with pytest.raises(BadRequestError, match="The chat template cannot be compiled"):
        ChatTemplate(source)
