"""Tool calls, output format and reasoning of a chat: checked, passed to the template, and made a guide and a parser."""

from typing import Any

from roseinfer.grammar.constraint import JsonSchema
from roseinfer.server.formats.constraints import CONSTRAINT_FIELDS, OutputConstraint
from roseinfer.server.formats.harmony_answer import HarmonyAnswer
from roseinfer.server.formats.marked_answer import MarkedAnswer
from roseinfer.server.formats.output_request import AnswerShape, OutputRequest
from roseinfer.server.formats.schemas import ChatRequest
from roseinfer.server.formats.tool_fields import Calls, ToolUse, check_template
from roseinfer.server.http.errors import bad_request
from roseinfer.server.request.service import Backend
from roseinfer.server.request.speech import NONE

# A request without any of these asks for plain text.
OUTPUT_FIELDS = frozenset(
    {"tools", "tool_choice", "reasoning_effort", "thinking_token_budget", "thinking_budget", *CONSTRAINT_FIELDS}
)
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
HARMONY_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
# Template variables that turn reasoning on or off.
REASONING_SWITCHES = ("enable_thinking", "thinking")


class ChatOutput:
    """Output options of one chat. Raises `ApiError` 400 when made.

    `template`: template variables that the request sets besides `chat_template_kwargs`. `answer`: maker of guide and
    parser. `warnings`: ignored fields.
    """

    def __init__(self, backend: Backend, request: ChatRequest) -> None:
        backend.prompts.check_template()
        self.warnings: list[str] = []
        self._speech = backend.speech
        self._use = ToolUse.of(request)
        self._asked = OutputConstraint(request)
        self.warnings += self._asked.warnings
        budget = self._checked_budget(request)
        self._check_tools(backend.prompts.template_variables)
        self.template = self._variables(request, backend.prompts.template_variables)
        harmony = self._speech.harmony
        if harmony is not None and request.reasoning_effort == "none":
            budget = 0  # its template cannot turn reasoning off
        wanted = OutputRequest(self._use, self._asked, budget, request.n or 1, self.warnings)
        self.answer: AnswerShape
        self.answer = MarkedAnswer(backend, wanted) if harmony is None else HarmonyAnswer(backend, harmony, wanted)

    def _variables(self, request: ChatRequest, known: frozenset[str]) -> dict[str, Any]:
        found: dict[str, Any] = {} if self._use is None else {"tools": self._use.described}
        effort = request.reasoning_effort
        if effort is None:
            return found
        if effort not in REASONING_EFFORTS:
            raise bad_request(f"reasoning_effort must be one of {', '.join(REASONING_EFFORTS)}", "reasoning_effort")
        if self._speech.harmony is not None:
            effort = self._harmony_effort(effort)
        switch = next((name for name in REASONING_SWITCHES if name in known), None)
        if "reasoning_effort" in known:
            found["reasoning_effort"] = effort
        elif effort == "none" and switch is not None:
            found[switch] = False
        else:
            self.warnings.append("reasoning_effort")
        return found

    def _harmony_effort(self, effort: str) -> str:
        """Return the effort that harmony knows instead. Without reasoning, its prompt asks for little."""
        known = HARMONY_EFFORTS.get(effort, effort)
        if effort not in (known, "none"):
            self.warnings.append(f"reasoning_effort: {effort} is taken as {known}")
        return known

    def _check_tools(self, variables: frozenset[str]) -> None:
        use = self._use
        if use is None:
            return
        check_template(variables)
        if self._speech.calls_name == NONE and use.calls is not Calls.NEVER:
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
            if not self._speech.reasons:
                self.warnings.append(f"{name}: the model has no reasoning")
                return None
            return int(budget)
        return None
