"""Messages merged for chat templates that are strict about roles."""

import pytest

from roseinfer.core.errors import InvalidRequestError
from roseinfer.text.chat import ChatTemplate
from roseinfer.text.merged_turns import merged_turns
from tests.text.tokenizers import byte_level

NAMES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
# Rule of Mistral's templates: a system message first, then user and assistant in turn.
STRICT = """{%- if messages[0].role == 'system' %}{%- set rest = messages[1:] %}{{- '[' + messages[0].content + ']' }}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- for message in rest %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {{- message.role[0] + ':' + message.content + ';' }}
{%- endfor %}"""


def said(*turns: str) -> list[dict[str, str]]:
    """Return messages; `u1` is the user's first one."""
    return [{"role": NAMES[turn[0]], "content": turn} for turn in turns]


@pytest.mark.parametrize(
    ("turns", "merged"),
    [
        (["s1", "u1", "s2"], [("system", "s1"), ("user", "u1\n\ns2")]),
        (["s1", "s2", "u1"], [("system", "s1\n\ns2"), ("user", "u1")]),
        (["u1", "a1", "s1", "u2"], [("user", "u1"), ("assistant", "a1"), ("user", "s1\n\nu2")]),
        (["s1", "u1", "u2", "a1"], [("system", "s1"), ("user", "u1\n\nu2"), ("assistant", "a1")]),
        (["u1", "a1", "t1", "s1"], [("user", "u1"), ("assistant", "a1"), ("tool", "t1"), ("user", "s1")]),
    ],
)
def test_merged(turns: list[str], merged: list[tuple[str, str]]) -> None:
    found = merged_turns(said(*turns))
    assert found is not None
    assert [(message["role"], message["content"]) for message in found] == merged


@pytest.mark.parametrize("turns", [["s1", "u1", "a1", "a2"], ["u1", "a1", "t1", "t2", "u2"], []])
def test_without_such_turns_there_is_nothing_to_do(turns: list[str]) -> None:
    assert merged_turns(said(*turns)) is None


def test_a_system_message_joins_the_users_turn_if_the_template_refuses_it() -> None:
    template = ChatTemplate(STRICT, byte_level())
    assert template.render(said("s1", "u1", "s2", "a1", "u2")) == "[s1]u:u1\n\ns2;a:a1;u:u2;"


def test_a_system_message_stays_if_the_template_accepts_it() -> None:
    template = ChatTemplate(
        "{% for message in messages %}{{ message.role[0] + message.content }}{% endfor %}", byte_level()
    )
    assert template.render(said("s1", "u1", "s2")) == "ss1uu1ss2"


def test_a_refusal_concerns_the_original_messages() -> None:
    template = ChatTemplate(STRICT, byte_level())
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        template.render(said("s1", "u1", "s2", "u2", "u3", "a1", "a2"))
