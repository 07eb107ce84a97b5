"""Tokens per step of similar requests, for promises that need several."""

from collections import deque
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from roseinfer.core.request import Request
from roseinfer.sched.cost.params import CostParams, Work

KNOWN_STEPS_COUNT = 56  # steps without drafts, after which their cost is known
MIN_REQUESTS_COUNT = 200  # of a tenant, before a promise may count on its drafts
MIN_STEPS_COUNT = 32  # of all of them together
MAX_REQUESTS_COUNT = 256  # newest ones that are kept
MAX_TENANTS = 256
MAX_GAIN_STEPS = 64  # over which `DraftYields.gains` are averaged
LOW_SHARE = 0.2  # of the requests, which had fewer tokens per step


class DraftYield(NamedTuple):
    """Tokens per step that most requests exceed, and mean drafts per step. Only steps with an offer of drafts count:
    those whose drafts were verified, and those without guesses, such as pauses.
    """

    tokens: float = 1.0
    drafts: float = 0.0


class DraftYields:
    """Records of ended requests by tenant: requests of one source are alike.

    `enabled`: the engine drafts. `by_head`: the runner's head makes the drafts, in the same steps. `gains`: right
    drafts in a step that most decoding rows can expect with 1, 2, ... drafts. Empty before any is known.
    `prompt_tokens`: mean of these steps, which make drafts dearer.
    """

    def __init__(self) -> None:
        self.enabled = self.by_head = False
        self._ended: dict[str, deque[tuple[int, int, int]]] = {}  # steps, tokens and drafts of each; newest tenant last
        self._known: dict[str, DraftYield | None] = {}
        self.gains: list[float] = []
        self.prompt_tokens = 0.0
        self._gain_steps = 0

    def add(self, tenant: str, steps: int, tokens: int, drafts: int) -> None:
        """Add a request that ended. `steps`: those that count. `tokens`, `drafts`: in these steps."""
        if not steps:
            return
        ended = self._ended.pop(tenant, None)
        if ended is None:
            ended = deque(maxlen=MAX_REQUESTS_COUNT)
            if len(self._ended) >= MAX_TENANTS:
                oldest = next(iter(self._ended))
                del self._ended[oldest]
                self._known.pop(oldest, None)
        self._ended[tenant] = ended
        ended.append((steps, tokens, drafts))
        self._known.pop(tenant, None)

    def expect(self, rows: Sequence[Sequence[float]], prompt_tokens: int) -> None:
        """Learn the `gains` of the rows of a step with so many tokens of prompts; a row without guesses has none."""
        depth = max([len(row) for row in rows])
        self._gain_steps = min(MAX_GAIN_STEPS, self._gain_steps + 1)
        self.prompt_tokens += (prompt_tokens - self.prompt_tokens) / self._gain_steps
        low = int(LOW_SHARE * len(rows))
        for drafts in range(depth):
            found = sorted([row[min(drafts, len(row) - 1)] if row else 0.0 for row in rows])[low]
            if drafts < len(self.gains):
                self.gains[drafts] += (found - self.gains[drafts]) / self._gain_steps
            else:
                self.gains.append(found)

    def of(self, tenant: str) -> DraftYield | None:
        """Return the yield of a tenant's requests, None if too few of them have ended."""
        if tenant not in self._known:
            self._known[tenant] = self._yield(self._ended.get(tenant, ()))
        return self._known[tenant]

    def step_s(self, request: Request, params: CostParams) -> float:
        """Return the time of a step with this request and its drafts alone."""
        found, context = self.of(request.tenant) or DraftYield(), len(request.tokens)
        drafts = ceil(found.drafts)
        made = drafts if self.by_head else 0
        return params.seconds(Work(0, 0.0, 1, params.reads.of(context), 0, drafts, drafts * context, made, made))

    def counted_tokens(self, request: Request, tpot_s: float, params: CostParams) -> float:
        """Return the tokens per step that a TPOT objective may count on: 1 if it needs no more, or if drafts do not
        suffice for it surely enough.
        """
        found = self.of(request.tenant)
        if found is None or tpot_s >= params.rows_s(1, len(request.tokens)):
            return 1.0
        return found.tokens if tpot_s * found.tokens >= self.step_s(request, params) else 1.0

    def _yield(self, ended: "deque[tuple[int, int, int]] | tuple[()]") -> DraftYield | None:
        steps = sum([each for each, _, _ in ended])
        if len(ended) < MIN_REQUESTS_COUNT or steps < MIN_STEPS_COUNT:
            return None
        means = sorted([tokens / own for own, tokens, _ in ended])
        return DraftYield(means[int(LOW_SHARE * len(means))], sum([drafts for _, _, drafts in ended]) / steps)
