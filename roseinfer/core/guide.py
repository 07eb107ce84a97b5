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
class Framing:
    """Framing of an output that consists of messages, each a header and a content.

    `begun`: tokens of the message that the prompt leaves open, at most up to the end of its header. `opening`: tokens
    that a header begins with. `channel`: the token before the name of a message's channel, `content`: the one that ends
    the header. `end`: the token that ends a message. `stops`: tokens that end it and the output. `thinking`, `answer`:
    channels of reasoning and of the answer.
    `headers`: grammar of a header from its `opening` on. A tool call's includes its arguments, after which the output
    ends. The second one, if there is a `budget`, has no reasoning. `must_answer`: the output does not end before a call
    or the end of the answer. `budget`: maximum number of tokens of reasoning in all; None = unlimited. When it is used
    up, `last_words` are forced, which finish with the end of the message.
    """

    begun: tuple[int, ...]
    opening: tuple[int, ...]
    channel: int
    content: int
    end: int
    stops: tuple[int, ...]
    thinking: str
    answer: str
    headers: tuple[str, ...]
    must_answer: bool
    budget: int | None = None
    last_words: tuple[int, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All token ids in it."""
        return (*self.begun, *self.opening, self.channel, self.content, self.end, *self.stops, *self.last_words)


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
    that are never sampled. `framing`: the output consists of messages, and grammar and triggers apply to the content of
    its answer. Grammars are in llguidance's serialised form or in Lark. `memory`: bytes of the largest compiled grammar
    and its growth (`grammar.memory.GrammarMemory`), None if not measured.
    """

    grammar: str = ""
    triggers: tuple[Trigger, ...] = ()
    ends_after: int = 0
    banned: tuple[int, ...] = ()
    thinking: Thinking | None = None
    framing: Framing | None = None
    memory: tuple[int, int] | None = None

    @property
    def constrains(self) -> bool:
        """True if any output could violate this."""
        limited = self.thinking is not None and self.thinking.budget is not None
        return bool(self.grammar or self.triggers or self.banned or limited or self.framing)
