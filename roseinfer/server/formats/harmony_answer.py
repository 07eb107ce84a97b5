"""Guide and parser of an answer in harmony."""

from dataclasses import replace
from functools import partial

from roseinfer.core.guide import GuideSpec
from roseinfer.grammar.constraint import Prepared
from roseinfer.server.formats.build_job import OutputSettings
from roseinfer.server.formats.output_request import LAST_WORDS, OutputRequest
from roseinfer.server.formats.tool_fields import Calls, ToolUse
from roseinfer.server.formats.tool_grammar import ToolSchemas
from roseinfer.server.request.service import Backend
from roseinfer.text.harmony.format import NAME, Harmony
from roseinfer.text.harmony.headers import channels, header_grammar


class HarmonyAnswer:
    """See `AnswerShape`. Constraints apply to the arguments of calls and to answers; reasoning is free.

    Headers follow a grammar as soon as anything is constrained: they decide what follows.
    """

    def __init__(self, backend: Backend, harmony: Harmony, wanted: OutputRequest) -> None:
        self._backend = backend
        self._harmony = harmony
        self._wanted = wanted
        self._budget = wanted.budget if harmony.reasoning else None

    def start_proof(self) -> None:
        self._wanted.asked.start_proof(self._backend.grammars)

    async def settings(self, prompt_ids: list[int]) -> OutputSettings:
        harmony, use = self._harmony, self._wanted.callable
        begun = harmony.begun(prompt_ids)
        guide = await self._guide(begun) if self._constrains else None
        stops = tuple(set(harmony.tokens.stops) - set(self._backend.info.facts.eos_token_ids))
        return OutputSettings(
            guide,
            partial(harmony.parser, begun, None if use is None else use.tools),
            "none" if use is None else NAME,
            self._wanted.warnings,
            stops,
        )

    @property
    def _constrains(self) -> bool:
        wanted = self._wanted
        return wanted.use is not None or wanted.asked.constraint is not None or self._budget is not None

    async def _guide(self, begun: tuple[int, ...]) -> GuideSpec:
        wanted, grammars = self._wanted, self._backend.grammars
        asked, use = wanted.asked, wanted.callable
        spec, ignored = GuideSpec(), list[str]()
        if asked.constraint is not None:
            spec, ignored = await grammars.guide(asked.constraint, asked.param, proof=asked.proof, n=wanted.n)
        memory = [] if spec.memory is None else [spec.memory]
        headers = []
        for reasoning in (self._harmony.reasoning, False)[: 1 if self._budget is None else 2]:
            text, lenient = await self._backend.offload.run(self._headers, use, reasoning)
            made, unenforced = await grammars.guide(Prepared(grammar=text), "tools", n=wanted.n)
            headers.append(made.grammar)
            memory += [] if made.memory is None else [made.memory]
            ignored += [*lenient, *unenforced]
        wanted.warnings.extend(dict.fromkeys(warning for warning in ignored if warning not in wanted.warnings))
        framing = self._harmony.framing(begun, tuple(headers), self._must_answer, self._budget, LAST_WORDS)
        return replace(spec, framing=framing, memory=max(memory, key=sum, default=None))

    @property
    def _must_call(self) -> bool:
        use = self._wanted.callable
        return use is not None and use.calls is Calls.ALWAYS

    @property
    def _must_answer(self) -> bool:
        return self._must_call or self._wanted.asked.constraint is not None

    def _headers(self, use: ToolUse | None, reasoning: bool) -> tuple[str, list[str]]:
        """Return the grammar of headers, and warnings. Slow for large schemas. Raises `ApiError` 400."""
        named = channels(reasoning, preambles=not self._must_answer, answer=not self._must_call)
        if use is None:
            return header_grammar(self._harmony.tokens, named), []
        schemas = ToolSchemas()
        others = use.calls is Calls.PERHAPS and use.callable == use.tools
        held = [tool for tool in use.callable if tool.strict or not others]
        return header_grammar(self._harmony.tokens, named, held, schemas, others), schemas.ignored
