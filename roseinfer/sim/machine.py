"""A runner that computes nothing: its requests end when the workload says so."""

from roseinfer.core.plan import StepPlan, StepResult, TokenMasks, new_row_result
from roseinfer.core.runner import Capabilities

TOKEN, END = 1, 2


class ExpectedRunner:
    """Computes nothing, at once: a request ends when its output has the length that `expect` announced."""

    capabilities = Capabilities()

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def expect(self, sequence_id: str, prompt_len: int, output_len: int) -> None:
        """Position `prompt_len + output_len - 2` samples the request's last token."""
        self._last[sequence_id] = prompt_len + output_len - 2

    def submit(self, plan: StepPlan) -> StepPlan:
        return plan

    def mask_space(self, lines: int) -> memoryview:
        raise NotImplementedError("there are no masks")

    def sample(self, handle: StepPlan, masks: TokenMasks | None = None) -> None:
        """Nothing to draw."""

    def collect(self, handle: StepPlan) -> StepResult:
        last, going, ending = self._last, (TOKEN,), (END,)
        rows = []
        for name, _, start, count, _, sample, _, _, _, _ in handle.rows:
            if not sample:
                tokens: tuple[int, ...] = ()
            else:
                tokens = ending if start + count > last[name] else going
            rows.append(new_row_result((name, tokens, None, None, None)))
        return StepResult(handle.step, rows)

    def close(self) -> None:
        """Holds nothing."""
