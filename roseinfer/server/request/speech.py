"""Formats of tool calls and reasoning of the served model, detected once at startup."""

from dataclasses import dataclass

from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.text.harmony.format import NAME as HARMONY
from roseinfer.text.harmony.format import Harmony
from roseinfer.text.reasoning import Reasoner
from roseinfer.text.tokenizer import Tokenizer
from roseinfer.text.tools.base import ToolFormat
from roseinfer.text.tools.registry import detect, format_names, tool_format

NONE = "none"


@dataclass(frozen=True, slots=True)
class Speech:
    """Output formats of a model. `calls`: tool calls; `reasoner`: reasoning marks; None: none known.

    `harmony`: the format of all messages, in place of the other two. `no_calls`: tool calls are disabled.
    """

    calls: ToolFormat | None = None
    reasoner: Reasoner | None = None
    harmony: Harmony | None = None
    no_calls: bool = False

    @property
    def parses(self) -> bool:
        """True if outputs of requests without any field for it are parsed, too."""
        return self.reasoner is not None or self.harmony is not None

    @property
    def reasons(self) -> bool:
        """True if reasoning is separated from the answer."""
        return self.reasoner is not None or (self.harmony is not None and self.harmony.reasoning)

    @property
    def calls_name(self) -> str:
        """Name of the format of tool calls."""
        if self.no_calls:
            return NONE
        return HARMONY if self.harmony is not None else NONE if self.calls is None else self.calls.name

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: ServerConfig) -> "Speech":
        """Detect by the chat template and the tokenizer, unless options override.

        Raises `ConfigError` for an unknown parser.
        """
        template = tokenizer.chat_template
        name = config.tool_call_parser
        known = (*format_names(), HARMONY)
        if name not in (None, NONE, *known):
            raise ConfigError(f"tool_call_parser must be {NONE} or one of {', '.join(known)}, got {name!r}")
        if name == HARMONY or (name in (None, NONE) and Harmony.used_by(tokenizer)):
            return cls(harmony=Harmony(tokenizer, config.reasoning), no_calls=name == NONE)
        name = name or detect(template) or NONE
        reasoner = Reasoner.detect(template, tokenizer) if config.reasoning else None
        return cls(None if name == NONE else tool_format(name, tokenizer), reasoner)
