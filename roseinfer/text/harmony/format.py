"""Harmony for one tokenizer: whether a model uses it, what a prompt leaves open, parsers and framings."""

from collections.abc import Sequence

from roseinfer.core.errors import ConfigError
from roseinfer.core.guide import Framing
from roseinfer.text.harmony.parser import HarmonyParser
from roseinfer.text.harmony.tokens import ANALYSIS, CHANNEL, END, FINAL, ROLE, START, HarmonyTokens
from roseinfer.text.output import OutputParser
from roseinfer.text.tokenizer import Tokenizer
from roseinfer.text.tools.base import Tool

NAME = "harmony"


class Harmony:
    """The format for one tokenizer. Thread safe. `reasoning` False: reasoning is part of the answer's text."""

    def __init__(self, tokenizer: Tokenizer, reasoning: bool = True) -> None:
        """Raise `ConfigError` if the tokenizer lacks one of the format's tokens."""
        tokens = HarmonyTokens.of(tokenizer)
        if tokens is None:
            raise ConfigError(f"the tokenizer does not have all special tokens of the format {NAME!r}")
        self.tokens = tokens
        self.reasoning = reasoning
        self._tokenizer = tokenizer
        self._opening = tuple(tokenizer.encode(START + ROLE, add_special_tokens=False))

    @staticmethod
    def used_by(tokenizer: Tokenizer) -> bool:
        """Return True if the chat template writes the tokens of the format."""
        template = tokenizer.chat_template
        return template is not None and CHANNEL in template and HarmonyTokens.of(tokenizer) is not None

    def begun(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of the message that a prompt leaves open, at most up to the end of its header."""
        tokens = self.tokens
        for at in range(len(prompt_ids) - 1, -1, -1):
            if prompt_ids[at] in tokens.ends:
                return ()
            if prompt_ids[at] == tokens.start:
                message = tuple(prompt_ids[at:])
                return message[: message.index(tokens.message) + 1] if tokens.message in message else message
        return ()

    def parser(self, begun: Sequence[int], tools: Sequence[Tool] | None) -> OutputParser:
        """Return a parser of the output after a prompt that leaves `begun` open. `tools` None: nothing is a call."""
        return HarmonyParser(
            self.tokens,
            self._tokenizer.decode(list(begun), skip_special_tokens=False),
            self.tokens.message in begun,
            None if tools is None else [tool.name for tool in tools],
            self.reasoning,
        )

    def framing(
        self,
        begun: Sequence[int],
        headers: tuple[str, ...],
        must_answer: bool,
        budget: int | None = None,
        last_words: str = "",
    ) -> Framing:
        """Return the engine's parameters. `headers`, `must_answer`, `budget`: see there. `last_words`: a text that is
        forced before the end of the reasoning.
        """
        tokens = self.tokens
        words = () if budget is None else self._tokenizer.encode(last_words + END, add_special_tokens=False)
        return Framing(
            begun=tuple(begun),
            opening=self._opening,
            channel=tokens.channel,
            content=tokens.message,
            end=tokens.end,
            stops=tokens.stops,
            thinking=ANALYSIS,
            answer=FINAL,
            headers=headers,
            must_answer=must_answer,
            budget=budget,
            last_words=tuple(words),
        )
