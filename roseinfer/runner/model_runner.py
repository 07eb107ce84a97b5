"""Execution of step plans: state changes, forward pass, sampling, results."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import TYPE_CHECKING

import torch

from roseinfer.adapters.memory import AdapterMemory
from roseinfer.attention.kv_store import KVStore
from roseinfer.core.errors import NO_TOKEN_ALLOWED
from roseinfer.core.observer import Span, unobserved
from roseinfer.core.plan import RowResult, StepLimits, StepPlan, StepResult, TokenMasks
from roseinfer.core.runner import Capabilities
from roseinfer.kernels.common.availability import has_triton
from roseinfer.models.base import CausalLM
from roseinfer.runner.device import start_download, upload
from roseinfer.runner.draft_steps import HeadSteps, MadeDrafts
from roseinfer.runner.forward import Columns, ForwardPass
from roseinfer.runner.host_copies import Copier, StepCopies
from roseinfer.runner.logprobs import PromptScores, Scores, score_prompt
from roseinfer.runner.masks import HostMasks
from roseinfer.runner.plan_state import PlanState
from roseinfer.runner.rows import SampleAt, Samples
from roseinfer.runner.sampler import NOTHING_LEFT, SampledTokens, Sampler
from roseinfer.runner.seats import SeatTable
from roseinfer.runner.timing import StepTimer, StepTimers

if TYPE_CHECKING:
    from roseinfer.runner.cuda_sampler import CudaMasks

NOT_FINITE_ERROR = "the model returned logits that are not finite"
NOTHING_LEFT_ERROR = f"{NO_TOKEN_ALLOWED}every logit is -inf"
CONSTRAINED_ERROR = f"{NO_TOKEN_ALLOWED}the output's constraint forbids all tokens that the request allows"


@dataclass(slots=True)
class StepHandle:
    """A submitted step. Only the runner looks inside."""

    plan: StepPlan
    timer: StepTimer
    samples: Samples = field(default_factory=lambda: Samples([], [], [], {}))
    logits: torch.Tensor | None = None
    sample_at: SampleAt | None = None
    greedy: torch.Tensor | None = None
    sampled: SampledTokens | None = None
    columns: Columns | None = None  # of a runner with a draft head
    made: MadeDrafts | None = None
    prompts: list[PromptScores] = field(default_factory=list)
    downloaded: "_Downloaded" = field(default_factory=lambda: _Downloaded())
    host_copies: StepCopies | None = None


@dataclass(frozen=True, slots=True)
class _Downloaded:
    """Results of a step on the host, valid once its timer has been waited for."""

    tokens: torch.Tensor | None = None
    scores: list[Scores] = field(default_factory=list)
    prompts: list[PromptScores] = field(default_factory=list)
    made: MadeDrafts | None = None

    @classmethod
    def start(cls, handle: StepHandle) -> "_Downloaded":
        """Queue the copies. Their sources stay alive with the handle."""
        tokens, scores = None, []
        if handle.sampled is not None:
            tokens = start_download(handle.sampled.tokens)
            scores = [part.download() for part in handle.sampled.scores]
        made = None if handle.made is None else handle.made.download()
        return cls(tokens, scores, [part.download() for part in handle.prompts], made)


def _make_masks(seats: SeatTable, limits: StepLimits) -> "HostMasks | CudaMasks":
    if not has_triton(seats.device):
        return HostMasks(seats.vocab_size, seats.device)
    from roseinfer.runner.cuda_sampler import CudaMasks

    return CudaMasks(limits.max_rows + limits.max_drafts, seats.vocab_size, seats.device)


class ModelRunner:
    """Runs plans in the order submitted: `submit`, `sample`, `collect`, each once per plan.

    Several plans may be submitted and sampled before the first is collected. Sampled tokens go to the token pool on the
    device, where the next forward pass finds them. An exception from any call is a failure of the engine; a failure of
    one request becomes its row's error instead.
    """

    def __init__(
        self,
        model: CausalLM,
        forward: ForwardPass,
        store: KVStore,
        seats: SeatTable,
        limits: StepLimits,
        copier: Copier | None = None,
        draft_steps: HeadSteps | None = None,
        adapters: AdapterMemory | None = None,
    ) -> None:
        """`copier`: copies between the store and host memory; without one, plans have no loads and stores.
        `draft_steps`: of a model with a draft head. `adapters`: None if requests have none.
        """
        self.capabilities = Capabilities(drafts=True, masks=True, logprobs=True, ahead=draft_steps is not None)
        self._draft_steps = draft_steps
        self._limits = limits
        self._model = model
        self._forward_pass = forward
        self._state = PlanState(store, seats, copier, adapters)
        self._seats = seats
        self._sampler = Sampler(seats)
        self._timers = StepTimers(seats.device)
        self._span: Span = unobserved
        self._unsampled: StepHandle | None = None
        self._in_flight = 0  # steps that were submitted and not collected
        self._masks = _make_masks(seats, limits)

    def observe(self, span: Span) -> None:
        """Report the phases `prepare` and `forward` of each further step as spans."""
        self._span = span
        self._forward_pass.observe(span)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> StepHandle:
        """Apply the plan's state changes and launch its forward pass."""
        assert self._unsampled is None, "the previous step must be sampled first"
        self._limits.check(plan)
        handle = StepHandle(plan, self._timers.new())
        if self._in_flight or plan.states is not None or not plan.rows:
            handle.timer.staged()  # where the device has to wait for the host, steps take no less
        self._in_flight += 1
        with self._span("prepare"):
            handle.host_copies = self._state.apply(plan)
            if self._draft_steps is not None and plan.admitted:
                self._draft_steps.admit([admission.seat for admission in plan.admitted])
        if plan.rows:
            self._forward(handle, Columns.of(plan.rows))
        if not plan.guided:  # a guided step's time includes waiting for its masks
            handle.timer.stop()
        self._unsampled = handle
        return handle

    def mask_space(self, lines: int) -> memoryview:
        """Return space for the words of `lines` masks, as in `Runner.mask_space`."""
        return self._masks.take(lines)

    @torch.inference_mode()
    def sample(self, handle: StepHandle, masks: TokenMasks | None = None) -> None:
        """Launch the sampling of a submitted step."""
        assert handle is self._unsampled, "steps are sampled in the order submitted, once"
        assert masks is not None or not handle.plan.guided, "rows with a guide are sampled under its mask"
        self._unsampled = None
        if not handle.plan.guided:
            handle.timer.start()
        if handle.logits is not None:
            rows, seats, ends, before = handle.samples
            of_rows = self._masks.place(masks, rows) if masks is not None else None
            handle.sampled = self._sampler.sample(
                handle.logits, seats, ends, handle.sample_at, of_rows, handle.greedy, before
            )
            handle.logits = handle.greedy = None
            if self._draft_steps is not None and handle.columns is not None:
                handle.made = self._draft_steps.run(handle.plan, handle.columns, handle.sampled.tokens)
        handle.timer.stop()
        with handle.timer.downloads():
            handle.downloaded = _Downloaded.start(handle)

    def collect(self, handle: StepHandle) -> StepResult:
        """Wait for a sampled step."""
        duration_s = handle.timer.wait()
        self._in_flight -= 1
        if handle.plan.adapter_loads:
            self._state.finish_adapters()
        rows, sampled = handle.plan.rows, handle.downloaded.tokens
        tokens: list[int] = [] if sampled is None else sampled.tolist()
        token_ids: list[tuple[int, ...]] = [()] * len(rows)
        settled = handle.samples.settled(rows, tokens) if handle.samples.drafts_before else range(len(tokens))
        for at in settled:
            if tokens[at] >= 0:
                token_ids[handle.samples.rows[at]] += (tokens[at],)
        results = [RowResult(row.request_id, ids) for row, ids in zip(rows, token_ids, strict=True)]
        self._add_scores(handle, results, settled)
        if handle.prompts or (tokens and min(tokens) < 0):
            self._find_errors(handle, tokens, settled)
        if handle.samples.drafts_before:
            self._count_drafts(handle.plan, token_ids)
        if self._seats.broken:
            results = self._state.with_errors(rows, results)
        result = StepResult(handle.plan.step, results, duration_s)
        if handle.downloaded.made is not None:
            result.ahead = handle.downloaded.made.of_rows(len(rows))
        return result if handle.host_copies is None else self._state.finish(result, handle.host_copies)

    def close(self) -> None:
        """Wait for copies, since memory is freed with the object."""
        self._state.close()

    # --- submit -------------------------------------------------------------------------------------------------
    def _forward(self, handle: StepHandle, columns: Columns) -> None:
        with self._span("forward"):
            out = self._forward_pass.run(columns, handle.timer.staged)
        if self._draft_steps is not None:
            handle.columns = columns
        handle.samples, handle.sample_at = columns.samples(), out.sample_at
        handle.logits, handle.greedy = out.logits, out.greedy
        hidden = out.hidden
        if hidden is None:
            return
        if len(hidden) > len(handle.samples.rows):
            hidden = self._score_prompts(handle, columns, hidden)
        if handle.samples.rows:
            handle.logits = self._model.logits(hidden)

    def _score_prompts(self, handle: StepHandle, columns: Columns, hidden: torch.Tensor) -> torch.Tensor:
        """Score the prompt chunks that request it. hidden: [L, d], the positions that need logits.

        Return the hidden states [n, d] of the step's samples.
        """
        ends = list(accumulate(columns.logits))
        for place, i in enumerate(columns.order):
            row = handle.plan.rows[i]
            seat = self._seats.at(row.seat)
            wanted = seat.params.prompt_logprobs
            # The prompt's last position predicts the first output, which sampling scores.
            count = min(row.start + row.count, seat.prompt_len - 1) - row.start
            if wanted is None or row.logits < row.count or count <= 0:
                continue
            first = ends[place] - row.logits
            tokens = self._seats.tokens[row.seat, row.start + 1 : row.start + 1 + count]
            states = hidden[first : first + count]
            scores = score_prompt(i, self._model.logits, states, tokens, wanted)
            handle.prompts.append(scores)
        sampled: list[int] = []
        for end, sample, drafts in zip(ends, columns.sample, columns.drafts, strict=True):
            if sample:
                sampled += range(end - 1 - len(drafts), end)
        return hidden.index_select(0, upload(sampled, torch.int64, hidden.device))

    # --- collect ------------------------------------------------------------------------------------------------
    @torch.inference_mode()
    def _count_drafts(self, plan: StepPlan, token_ids: list[tuple[int, ...]]) -> None:
        """Let edits count what came of rows with drafts."""
        for row, ids in zip(plan.rows, token_ids, strict=True):
            if row.drafts:
                self._seats.output_drafts(row.seat, ids)

    def _add_scores(self, handle: StepHandle, results: list[RowResult], settled: Sequence[int]) -> None:
        if handle.sampled is not None and handle.sampled.scored:
            entries = chain.from_iterable(part.to_python() for part in handle.downloaded.scores)
            scored = dict(zip(handle.sampled.scored, entries, strict=True))
            for at in settled:
                entry = scored.get(at)
                if entry is not None:
                    i = handle.samples.rows[at]
                    results[i] = results[i]._replace(logprobs=(*(results[i].logprobs or ()), entry))
        for prompt in handle.downloaded.prompts:
            results[prompt.row] = results[prompt.row]._replace(prompt_logprobs=prompt.to_python())

    def _find_errors(self, handle: StepHandle, tokens: list[int], settled: Sequence[int]) -> None:
        """Find the requests that failed in this step."""
        rows = handle.plan.rows
        for at in settled:
            i, token = handle.samples.rows[at], tokens[at]
            if token == NOTHING_LEFT:
                self._state.fail(rows[i], CONSTRAINED_ERROR if i in handle.plan.guided else NOTHING_LEFT_ERROR)
            elif token < 0:
                self._state.fail(rows[i], NOT_FINITE_ERROR)
        for prompt in handle.downloaded.prompts:
            if not bool(prompt.finite.all()):
                self._state.fail(rows[prompt.row], NOT_FINITE_ERROR)
