"""Checks of templates in another process before they are compiled in this one."""

import pytest

from roseinfer.core.errors import ConfigError
from roseinfer.text.template_check import TOO_LARGE, trusted_template
from roseinfer.text.tokenizer import Tokenizer
from tests.text.tokenizers import byte_fallback, byte_level


def with_template(source: str) -> Tokenizer:
    plain = byte_level()
    return Tokenizer(plain.backend, plain.config, source)


def test_a_good_template() -> None:
    template = trusted_template(byte_level())
    assert template is not None and template.encode([{"role": "user", "content": "x"}])
    assert trusted_template(byte_fallback()) is None


@pytest.mark.parametrize(
    ("source", "reason"),
    [("{{ 'a' * (10**10) }}", TOO_LARGE), ("{% for %}", "chat_template: Expected an expression")],
)  # fmt: skip
def test_templates_that_cannot_be_used(source: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^chat_template: ") as caught:
        trusted_template(with_template(source))
    assert str(caught.value).startswith(reason) and "\n" not in str(caught.value)


def test_a_template_may_refuse_the_first_message() -> None:
    assert trusted_template(with_template("{{ raise_exception('tools are missing') }}")) is not None
