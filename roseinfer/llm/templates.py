"""Chat templates of a model: its own, and those that a program gives."""

from pathlib import Path

from roseinfer.core.errors import ConfigError, InvalidRequestError
from roseinfer.text.chat import ChatTemplate
from roseinfer.text.template_check import checked_template
from roseinfer.text.tokenizer import Tokenizer


class Templates:
    """Compiled templates by source. `default`: source or file of the one that replaces the model's."""

    def __init__(self, tokenizer: Tokenizer, default: str | Path | None = None) -> None:
        self._tokenizer = tokenizer
        self._default = tokenizer.chat_template if default is None else _source(default)
        self._compiled: dict[str, ChatTemplate] = {}

    def get(self, given: str | Path | None = None) -> ChatTemplate:
        """Return the template of a source or file, or the default one.

        Raise `InvalidRequestError` if there is none, and `ConfigError` for one that cannot be read or compiled.
        """
        source = self._default if given is None else _source(given)
        if source is None:
            raise InvalidRequestError("the model has no chat template; pass chat_template", "messages")
        template = self._compiled.get(source)
        if template is None:
            template = self._compiled[source] = checked_template(source, self._tokenizer)
        return template


def _source(given: str | Path) -> str:
    """Return the source of a template, which is given as such or as the path of a file."""
    if isinstance(given, str) and any(mark in given for mark in ("{", "\n")):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template: cannot read {str(given)!r}: {error}") from error
