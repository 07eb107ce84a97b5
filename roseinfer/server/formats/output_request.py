"""Output options of a chat, checked, and the interface of classes that make guide and parser of them."""

from dataclasses import dataclass
from typing import Protocol

from roseinfer.server.formats.build_job import OutputSettings
from roseinfer.server.formats.constraints import OutputConstraint
from roseinfer.server.formats.tool_fields import Calls, ToolUse

# Text that the model is forced to write when its budget is spent, before the end of its reasoning.
LAST_WORDS = "\n\nNo more time to think: what is above must do for the answer.\n"


@dataclass(frozen=True, slots=True)
class OutputRequest:
    """Output options of one chat. `use`: its tools. `asked`: constraint of the text. `budget`: of reasoning, in tokens.

    `n`: samples. `warnings`: list to add to.
    """

    use: ToolUse | None
    asked: OutputConstraint
    budget: int | None
    n: int
    warnings: list[str]

    @property
    def callable(self) -> ToolUse | None:
        """The tools, if the answer may call one."""
        return None if self.use is None or self.use.calls is Calls.NEVER else self.use


class AnswerShape(Protocol):
    """Maker of guide and parser for the answers of one kind of model."""

    def start_proof(self) -> None:
        """Start to verify a format without tool calls, so that this runs while the prompt is made."""
        ...

    async def settings(self, prompt_ids: list[int]) -> OutputSettings:
        """Return guide and parser. Raises `ApiError` 400 or `InvalidRequestError` for what cannot be enforced."""
        ...
