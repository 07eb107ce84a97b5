"""What constrains an output, as it travels from the server to the engine: plain data, nothing compiled."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """How a model thinks before it answers. What constrains the answer begins behind the thinking.

    `inside`: whether the prompt leaves the model thinking; else it may begin to with any of the tokens `begin`, before
    it says anything else or where its output is free. `end`: token ids that end it, one after the other. `budget`:
    after so many tokens of thinking, all in all, the model is made to say `last_words` (token ids, the last of them
    `end`; empty: `end` alone), None = whenever it likes.
    """

    inside: bool
    begin: tuple[int, ...]
    end: tuple[int, ...]
    budget: int | None = None
    last_words: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """What wakes a grammar within an output that is free otherwise: a token, or a text if there is no such token.

    `grammar` holds from behind it until it is complete. `at_start`: it counts only as the first that is said, but for
    white space.
    """

    grammar: str
    token_id: int | None = None
    text: str = ""
    at_start: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideSpec:
    """What constrains the output of a request; thinking is constrained by its budget alone.

    `grammar`: the whole output follows it and ends when it is complete; empty: the output is free, but for what
    `triggers` wake. `ends_after`: so many awakened grammars, when complete, end the output; 0 = it goes on.
    `banned`: tokens that are never said. Grammars are in llguidance's own serialised form or in Lark. `memory`: bytes
    that the largest of the grammars takes, compiled and by how much it grows (`grammar.memory.GrammarMemory`), None if
    that was not measured.
    """

    grammar: str = ""
    triggers: tuple[Trigger, ...] = ()
    ends_after: int = 0
    banned: tuple[int, ...] = ()
    thinking: Thinking | None = None
    memory: tuple[int, int] | None = None

    @property
    def constrains(self) -> bool:
        """Whether any output could break it."""
        limited = self.thinking is not None and self.thinking.budget is not None
        return bool(self.grammar or self.triggers or self.banned or limited)
