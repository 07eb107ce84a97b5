"""Tool calls, output format and reasoning of a chat: checked, passed to the template, and made a guide and a parser."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from roseinfer.core.guide import GuideSpec, Thinking
from roseinfer.grammar.constraint import Constraint, JsonSchema
from roseinfer.server.formats.build_job import OutputSettings
from roseinfer.server.formats.constraints import CONSTRAINT_FIELDS, OutputConstraint
from roseinfer.server.formats.schemas import ChatRequest
from roseinfer.server.formats.tool_fields import Calls, ToolUse, check_template
from roseinfer.server.formats.tool_grammar import tool_constraint
from roseinfer.server.http.errors import bad_request
from roseinfer.server.request.grammars import Proof
from roseinfer.server.request.service import Backend
from roseinfer.text.output import OutputParser
from roseinfer.text.tools.base import ToolFormat

# A request without any of these asks for plain text.
OUTPUT_FIELDS = frozenset(
    {"tools", "tool_choice", "reasoning_effort", "thinking_token_budget", "thinking_budget", *CONSTRAINT_FIELDS}
)
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# Template variables that turn reasoning on or off.
REASONING_SWITCHES = ("enable_thinking", "thinking")
# Text that the model is forced to write when its budget is spent, before the end of its reasoning.
LAST_WORDS = "\n\nNo more time to think: what is above must do for the answer.\n"


class ChatOutput:
    """Output options of one chat. Raises `ApiError` 400 when made.

    `template`: template variables that the request sets besides `chat_template_kwargs`. `warnings`: ignored fields.
    """

    def __init__(self, backend: Backend, request: ChatRequest) -> None:
        backend.prompts.check_template()
        self.warnings: list[str] = []
        self._backend = backend
        self._calls, self._reasoner = backend.speech.calls, backend.speech.reasoner
        self._inside = False
        self._proof: Proof | None = None
        self._use = ToolUse.of(request)
        self._asked = OutputConstraint(request)
        self._n = request.n or 1
        self.warnings += self._asked.warnings
        self._budget = self._checked_budget(request)
        self._check_tools(backend.prompts.template_variables)
        self.template = self._variables(request, backend.prompts.template_variables)

    # --- for the prompt -------------------------------------------------------------------------------------------
    def _variables(self, request: ChatRequest, known: frozenset[str]) -> dict[str, Any]:
        found: dict[str, Any] = {} if self._use is None else {"tools": self._use.described}
        effort = request.reasoning_effort
        if effort is None:
            return found
        if effort not in REASONING_EFFORTS:
            raise bad_request(f"reasoning_effort must be one of {', '.join(REASONING_EFFORTS)}", "reasoning_effort")
        switch = next((name for name in REASONING_SWITCHES if name in known), None)
        if "reasoning_effort" in known:
            found["reasoning_effort"] = effort
        elif effort == "none" and switch is not None:
            found[switch] = False
        else:
            self.warnings.append("reasoning_effort")
        return found

    def _check_tools(self, variables: frozenset[str]) -> None:
        use = self._use
        if use is None:
            return
        check_template(variables)
        if self._calls is None and use.calls is not Calls.NEVER:
            message = "the model's tool call format is unknown; set the server option --tool-call-parser"
            raise bad_request(message, "tools", "unsupported_field")
        if self._asked.constraint is None or use.calls is Calls.NEVER:
            return
        param = self._asked.param
        if use.calls is Calls.ALWAYS and param == "response_format":
            self._asked.constraint = None  # an answer with a required call has no other text
        elif use.calls is Calls.ALWAYS:
            raise bad_request(f"tool_choice requires a tool call and cannot be combined with {param}", param)
        elif not isinstance(self._asked.constraint, JsonSchema):
            raise bad_request(f"{param}: only JSON formats can be combined with tools", param)

    def _checked_budget(self, request: ChatRequest) -> int | None:
        budgets = {request.thinking_token_budget, request.thinking_budget} - {None}
        if len(budgets) > 1:
            raise bad_request("thinking_budget and thinking_token_budget differ", "thinking_budget")
        for name in ("thinking_token_budget", "thinking_budget"):
            budget = getattr(request, name)
            if budget is None or budget == -1:
                continue
            if self._reasoner is None:
                self.warnings.append(f"{name}: the model has no reasoning")
                return None
            return int(budget)
        return None

    # --- for the output -------------------------------------------------------------------------------------------
    def start_proof(self) -> None:
        """Start to verify a format without tool calls, so that this runs while the prompt is made."""
        asked = self._asked
        if asked.constraint is not None and self._calling() is None:
            thinks = self._reasoner is not None
            self._proof = self._backend.grammars.begin(asked.constraint, asked.param, thinks)

    async def settings(self, prompt_ids: list[int]) -> OutputSettings:
        """Return guide and parser. Raises `ApiError` 400 or `InvalidRequestError` for what cannot be enforced."""
        guide = await self._guide(prompt_ids)
        calls = self._calling()
        return OutputSettings(guide, self._parser(), "none" if calls is None else calls.name, self.warnings)

    async def _guide(self, prompt_ids: list[int]) -> GuideSpec | None:
        thinking = await self._thinking(prompt_ids)
        found = await self._constraint(thinking is not None)
        if found is not None:
            spec, ignored = await self._backend.grammars.guide(*found, thinking, self._proof, self._n)
            self.warnings += [warning for warning in ignored if warning not in self.warnings]
        else:
            spec = GuideSpec(thinking=thinking)
        spec = replace(spec, banned=self._banned())
        return spec if spec.constrains else None

    async def _constraint(self, thinks: bool) -> tuple[Constraint, str] | None:
        """Return the constraint and its field."""
        asked, calls, use = self._asked, self._calling(), self._use
        if calls is None or use is None:
            return None if asked.constraint is None else (asked.constraint, asked.param)
        document = asked.constraint
        if document is not None:
            await self._backend.grammars.prove(document, asked.param)  # an error then names its field
        assert document is None or isinstance(document, JsonSchema)
        made, ignored = await self._backend.offload.run(tool_constraint, calls, use, document, thinks)
        self.warnings += ignored
        return made, "tools"

    def _calling(self) -> ToolFormat | None:
        """Return the format of tool calls if the answer may have some."""
        wanted = self._use is not None and self._use.calls is not Calls.NEVER
        return self._calls if wanted else None

    def _parser(self) -> Callable[[], OutputParser] | None:
        """Return a factory of parsers of one output; None for plain text."""
        calls, reasoner = self._calling(), self._reasoner
        reads = None
        if calls is not None and self._use is not None:
            reads = partial(calls.parser, self._use.tools)
        if reasoner is None:
            return reads
        inside = self._inside
        bare = self._asked.constraint is not None  # the grammar allows white space after the reasoning
        return lambda: reasoner.parser(inside, None if reads is None else reads(), bare=bare)

    async def _thinking(self, prompt_ids: list[int]) -> Thinking | None:
        reasoner = self._reasoner
        if reasoner is None:
            return None
        self._inside = await self._backend.offload.run(reasoner.inside, prompt_ids)
        words: list[int] = []
        if self._budget is not None:
            words = self._backend.tokenizer.encode(LAST_WORDS + reasoner.end.text, add_special_tokens=False)
        return reasoner.thinking(self._inside, self._budget, words)

    def _banned(self) -> tuple[int, ...]:
        """Return the tokens that open a tool call if the model sees tools that it must not call."""
        if self._calls is None or self._use is None or self._calling() is not None:
            return ()
        return tuple(mark.id for mark in self._calls.marks if mark.id is not None)
