"""Chat templates of a model: its own, and those that a program gives."""

from pathlib import Path

from roseinfer.core.errors import InvalidRequestError
from roseinfer.text.chat import ChatTemplate
from roseinfer.text.template_check import checked_template
from roseinfer.text.tokenizer import Tokenizer
from roseinfer.text.tokenizer_files import template_source


class Templates:
    """Compiled templates by source. `default`: source or file of the one that replaces the model's."""

    def __init__(self, tokenizer: Tokenizer, default: str | Path | None = None) -> None:
        self._tokenizer = tokenizer
        self._default = tokenizer.chat_template if default is None else template_source(default)
        self._compiled: dict[str, ChatTemplate] = {}

    def get(self, given: str | Path | None = None) -> ChatTemplate:
        """Return the template of a source or file, or the default one.

        Raise `InvalidRequestError` if there is none, and `ConfigError` for one that cannot be read or compiled.
        """
        if not isinstance(given, str | Path | None):
            message = f"chat_template must be text or a path, got {type(given).__name__}"
            raise InvalidRequestError(message, "chat_template")
        source = self._default if given is None else template_source(given)
        if source is None:
            raise InvalidRequestError("the model has no chat template; pass chat_template", "messages")
        template = self._compiled.get(source)
        if template is None:
            template = self._compiled[source] = checked_template(source, self._tokenizer)
        return template
