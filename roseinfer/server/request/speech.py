"""How the served model says what is not plain text: its tool calls and its thinking. Found once, with the engine."""

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
    """`calls`: its format of tool calls, `reasoner`: its marks of thinking; None: it has none that is known."""

    calls: ToolFormat | None = None
    reasoner: Reasoner | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: ServerConfig) -> "Speech":
        """By the chat template, unless the options say otherwise. Raises `ConfigError` for a parser there is not."""
        template = tokenizer.chat_template
        name = config.tool_call_parser or detect(template) or NONE
        if name != NONE and name not in format_names():
            raise ConfigError(f"tool_call_parser must be {NONE} or one of {', '.join(format_names())}, got {name!r}")
        reasoner = Reasoner.detect(template, tokenizer) if config.reasoning else None
        return cls(None if name == NONE else tool_format(name, tokenizer), reasoner)
