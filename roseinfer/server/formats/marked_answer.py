"""Guide and parser of an answer with marks: around reasoning, and before tool calls."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from roseinfer.core.guide import GuideSpec, Thinking
from roseinfer.grammar.constraint import Constraint, JsonSchema
from roseinfer.server.formats.build_job import OutputSettings
from roseinfer.server.formats.output_request import LAST_WORDS, OutputRequest
from roseinfer.server.formats.tool_fields import Calls, ToolUse
from roseinfer.server.formats.tool_grammar import tool_constraint
from roseinfer.server.request.service import Backend
from roseinfer.text.output import OutputParser
from roseinfer.text.tools.base import CallParser, ToolFormat


class MarkedAnswer:
    """See `AnswerShape`."""

    def __init__(self, backend: Backend, wanted: OutputRequest) -> None:
        self._backend = backend
        self._wanted = wanted
        self._calls, self._reasoner = backend.speech.calls, backend.speech.reasoner
        self._inside = False

    def start_proof(self) -> None:
        if self._calling() is None:
            self._wanted.asked.start_proof(self._backend.grammars, leading_space=self._reasoner is not None)

    async def settings(self, prompt_ids: list[int]) -> OutputSettings:
        guide = await self._guide(prompt_ids)
        calls = self._calling()
        return OutputSettings(guide, self._parser(), "none" if calls is None else calls.name, self._wanted.warnings)

    async def _guide(self, prompt_ids: list[int]) -> GuideSpec | None:
        thinking, wanted = await self._thinking(prompt_ids), self._wanted
        found = await self._constraint(thinking is not None)
        if found is not None:
            spec, ignored = await self._backend.grammars.guide(*found, thinking, wanted.asked.proof, wanted.n)
            wanted.warnings.extend([warning for warning in ignored if warning not in wanted.warnings])
        else:
            spec = GuideSpec(thinking=thinking)
        spec = replace(spec, banned=self._banned())
        return spec if spec.constrains else None

    async def _constraint(self, thinks: bool) -> tuple[Constraint, str] | None:
        """Return the constraint and its field."""
        asked, calls, use = self._wanted.asked, self._calling(), self._wanted.use
        if calls is None or use is None:
            return None if asked.constraint is None else (asked.constraint, asked.param)
        document = asked.constraint
        if document is not None:
            await self._backend.grammars.prove(document, asked.param)  # an error then names its field
        assert document is None or isinstance(document, JsonSchema)
        made, ignored = await self._backend.offload.run(tool_constraint, calls, use, document, thinks)
        self._wanted.warnings.extend(ignored)
        return made, "tools"

    def _calling(self) -> ToolFormat | None:
        """Return the format of tool calls if the answer may have some."""
        return None if self._wanted.callable is None else self._calls

    def _parser(self) -> Callable[[], OutputParser] | None:
        """Return a factory of parsers of one output; None for plain text."""
        calls, reasoner, use = self._calling(), self._reasoner, self._wanted.use
        reads = None
        if calls is not None and use is not None:
            reads = partial(_call_parser, calls, use)
        if reasoner is None:
            return reads
        inside = self._inside
        bare = self._wanted.asked.constraint is not None  # the grammar allows white space after the reasoning
        return lambda: reasoner.parser(inside, None if reads is None else reads(), bare=bare)

    async def _thinking(self, prompt_ids: list[int]) -> Thinking | None:
        reasoner = self._reasoner
        if reasoner is None:
            return None
        self._inside = await self._backend.offload.run(reasoner.inside, prompt_ids)
        return reasoner.thinking(self._inside, self._wanted.budget, LAST_WORDS)

    def _banned(self) -> tuple[int, ...]:
        """Return the tokens that open a tool call if the model sees tools that it must not call."""
        if self._calls is None or self._wanted.use is None or self._calling() is not None:
            return ()
        return tuple(mark.id for mark in self._calls.marks if mark.id is not None)


def _call_parser(calls: ToolFormat, use: ToolUse) -> CallParser:
    parser = calls.parser(use.tools)
    parser.only_calls = use.calls is Calls.ALWAYS
    return parser
