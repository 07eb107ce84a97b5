"""Output constraints as plain data, sent from the server to the engine. Grammars are not compiled yet."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """Bounds of a model's thinking before its answer. Constraints on the answer apply after the thinking.

    `inside`: the prompt ends within the thinking. Otherwise the model may start to think with any of the tokens
    `begin`, before any other output or where its output is unconstrained. `end`: sequence of token ids that ends the
    thinking. `budget`: maximum number of thinking tokens in all; None = unlimited. When it is used up, `last_words` are
    forced (token ids that finish with `end`; empty: `end` alone).
    """

    inside: bool
    begin: tuple[int, ...]
    end: tuple[int, ...]
    budget: int | None = None
    last_words: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """Start of a grammar within otherwise free output: a token, or a text if there is no such token.

    `grammar` applies after the trigger until it is complete. `at_start`: the trigger counts only at the start of the
    output, after optional white space.
    """

    grammar: str
    token_id: int | None = None
    text: str = ""
    at_start: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideSpec:
    """Constraints on the output of a request. Thinking is constrained by its budget alone.

    `grammar`: the whole output follows it and ends when it is complete; empty = free output except after `triggers`.
    `ends_after`: the output ends after this many triggered grammars are complete; 0 = it continues. `banned`: token ids
    that are never sampled. Grammars are in llguidance's serialised form or in Lark. `memory`: bytes of the largest
    compiled grammar and its growth (`grammar.memory.GrammarMemory`), None if not measured.
    """

    grammar: str = ""
    triggers: tuple[Trigger, ...] = ()
    ends_after: int = 0
    banned: tuple[int, ...] = ()
    thinking: Thinking | None = None
    memory: tuple[int, int] | None = None

    @property
    def constrains(self) -> bool:
        """True if any output could violate this."""
        limited = self.thinking is not None and self.thinking.budget is not None
        return bool(self.grammar or self.triggers or self.banned or limited)
