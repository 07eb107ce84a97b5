"""Runner of an engine whose requests are prompt-only: state changes, forward pass, pooling, results."""

from dataclasses import dataclass

import torch

from roseinfer.core.observer import Span, unobserved
from roseinfer.core.plan import StepLimits, StepPlan, StepResult, TokenMasks
from roseinfer.core.runner import Capabilities
from roseinfer.runner.forward import Columns, ForwardPass
from roseinfer.runner.host_copies import StepCopies
from roseinfer.runner.plan_state import PlanState
from roseinfer.runner.pooling import PooledRows, Pooler, StepVectors
from roseinfer.runner.timing import StepTimer, StepTimers

VECTOR_NOT_FINITE_ERROR = "the model returned hidden states that are not finite"


@dataclass(slots=True)
class PooledHandle:
    """Submitted step. Only the runner looks inside."""

    plan: StepPlan
    timer: StepTimer
    vectors: StepVectors | None = None
    downloaded: StepVectors | None = None  # on the host once the timer has been waited for
    host_copies: StepCopies | None = None


class PoolingRunner:
    """Runs plans in the order submitted: `submit`, `sample`, `collect`, each once per plan.

    `submit` launches everything; `sample` only starts the download of the vectors. A request fails alone if its vector
    is not finite.
    """

    capabilities = Capabilities()

    def __init__(
        self,
        forward: ForwardPass,
        state: PlanState,
        limits: StepLimits,
        pooler: Pooler,
    ) -> None:
        self._limits = limits
        self._forward_pass = forward
        self._state = state
        self._pooler = pooler
        self._timers = StepTimers(state.seats.device)
        self._span: Span = unobserved

    def observe(self, span: Span) -> None:
        """Report the phases `prepare` and `forward` of each further step as spans."""
        self._span = span
        self._forward_pass.observe(span)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> PooledHandle:
        """Apply the plan's state changes and launch its forward pass."""
        self._limits.check(plan)
        handle = PooledHandle(plan, self._timers.new())
        handle.timer.staged()
        with self._span("prepare"):
            handle.host_copies = self._state.apply(plan)
        if plan.rows:
            columns = Columns.of(plan.rows)
            with self._span("forward"):
                out = self._forward_pass.run(columns)
            assert out.hidden is not None, "the graphs of a pooling engine end with hidden states"
            handle.vectors = self._pooler.pool(out.hidden, PooledRows.of(plan.rows, list(columns.order)))
        handle.timer.stop()
        return handle

    def mask_space(self, lines: int) -> memoryview:
        raise AssertionError("nothing is sampled")

    @torch.inference_mode()
    def sample(self, handle: PooledHandle, masks: TokenMasks | None = None) -> None:
        """Start the download of the step's vectors."""
        with handle.timer.downloads():
            if handle.vectors is not None:
                handle.downloaded = handle.vectors.download()

    def collect(self, handle: PooledHandle) -> StepResult:
        """Wait for the step."""
        duration_s = handle.timer.wait()
        rows, found = handle.plan.rows, handle.downloaded
        result = StepResult(handle.plan.step, [], duration_s)
        if found is not None:
            for index, finite in zip(found.indices, found.finite(), strict=True):
                if not finite:
                    self._state.fail(rows[index], VECTOR_NOT_FINITE_ERROR)
            result.rows = self._state.with_errors(rows, found.results(rows))
        return result if handle.host_copies is None else self._state.finish(result, handle.host_copies)

    def close(self) -> None:
        """Wait for copies, since memory is freed with the object."""
        self._state.close()
