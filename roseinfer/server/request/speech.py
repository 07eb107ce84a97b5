"""Formats of tool calls and reasoning of the served model, detected once at startup."""

from dataclasses import dataclass

from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.text.reasoning import Reasoner
from roseinfer.text.tokenizer import Tokenizer
from roseinfer.text.tools.base import ToolFormat
from roseinfer.text.tools.registry import detect, format_names, tool_format

NONE = "none"


@dataclass(frozen=True, slots=True)
class Speech:
    """Output formats of a model. `calls`: tool calls; `reasoner`: reasoning marks; None: none known."""

    calls: ToolFormat | None = None
    reasoner: Reasoner | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: ServerConfig) -> "Speech":
        """Detect by the chat template, unless options override. Raises `ConfigError` for an unknown parser."""
        template = tokenizer.chat_template
        name = config.tool_call_parser or detect(template) or NONE
        if name != NONE and name not in format_names():
            raise ConfigError(f"tool_call_parser must be {NONE} or one of {', '.join(format_names())}, got {name!r}")
        reasoner = Reasoner.detect(template, tokenizer) if config.reasoning else None
        return cls(None if name == NONE else tool_format(name, tokenizer), reasoner)
