"""Hand-made states for policies with objectives: requests that wait or run, and a view of them."""

from typing import Any

from roseinfer.core.request import Prompt, Request, RequestMeta, Status
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Rejection, Slo
from roseinfer.sched.policy import Admitted, Decision, Policy, Queued, Verdict, View


class State:
    """Plays the scheduler for one policy."""

    def __init__(self, policy: Policy, *, budget: int = 2048, seats: int = 64, free_blocks: int = 10_000) -> None:
        self.policy = policy
        self.now_s = 0.0
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.cached, self.load_s = 0, 0.0  # tokens of every prompt that come from host memory, and how long that takes
        self._budget, self._seats, self._free_blocks, self._step = budget, seats, free_blocks, 0

    def wait(
        self,
        name: str,
        prompt: int = 10,
        *,
        predicted: int = 100,
        max_tokens: int = 1000,
        hinted: bool = False,
        tenant: str = "",
        priority: int = 0,
        **objectives: float,
    ) -> Request:
        request = Request(
            name,
            Prompt(
                [1] * prompt,
                SequenceParams(max_tokens=max_tokens),
                RequestMeta(
                    slo=Slo(**objectives) if objectives else None,
                    predicted_len=predicted,
                    hinted=hinted,
                    tenant=tenant,
                    priority=priority,
                    arrival_s=self.now_s,
                ),
            ),
        )
        self.policy.observe(Queued(request))
        self.waiting.append(request)
        return request

    def run(self, name: str, prompt: int = 10, *, first_s: float | None = None, **options: Any) -> Request:
        """A request whose first token came at `first_s`: it decodes."""
        request = self.wait(name, prompt, **options)
        self.start(request)
        request.planned = request.computed = prompt
        request.tokens.append(1)
        request.first_token_s = self.now_s if first_s is None else first_s
        return request

    def start(self, request: Request) -> None:
        self.waiting.remove(request)
        self.running.append(request)
        request.status, request.seat = Status.RUNNING, len(self.running)
        self.policy.observe(Admitted(request.request_id, self.now_s, 0))

    def begin(self) -> Decision:
        self._step += 1
        return self.policy.begin(self.view())

    def view(self) -> View:
        return View(
            now_s=self.now_s,
            step=self._step,
            free_seats=self._seats,
            free_blocks=self._free_blocks,
            block_size=16,
            token_budget=self._budget,
            max_model_len=4096,
            running=tuple(self.running),
            num_waiting=len(self.waiting),
            waiting=lambda: [request for request in self.waiting if _can_start(request)],
            members=lambda lead: (lead,),
            uncached=lambda request: len(request.tokens) - self.cached,
            can_start=_can_start,
            load_s=lambda request: self.load_s,
        )

    def decode(self, decision: Decision) -> list[str]:
        """Return the decoding requests and give each a token."""
        names = []
        for request in decision.select(self.running):
            if request.remaining == 1 and request.planned >= request.prompt_len:
                request.tokens.append(1)
                request.planned = request.computed = len(request.tokens) - 1
                names.append(request.request_id)
        return sorted(names)

    def admitted(self, decision: Decision) -> dict[str, int]:
        """Return the requests that would start, with their tokens."""
        asked = [r for r in decision.order(self.waiting) if decision.admit(r) is Verdict.ADMIT]
        return {request.request_id: decision.chunk(request, self._budget) for request in asked}

    def rejected(self, decision: Decision) -> dict[str, Rejection]:
        return {request.request_id: rejection for request, rejection in decision.rejections()}


def _can_start(request: Request) -> bool:
    return request.status is Status.WAITING and not request.loading
