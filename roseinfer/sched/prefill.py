"""Prefill budget: how many prompt tokens and requests a step may start, and the options that set it."""

from dataclasses import dataclass
from itertools import islice

from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.config.option import check_positive, option
from roseinfer.core.errors import ConfigError
from roseinfer.core.request import Request
from roseinfer.core.slo import Cause
from roseinfer.sched.policy import View


@dataclass(frozen=True, kw_only=True)
class PrefillOptions:
    """Bounds on a step, in addition to those of the scheduler."""

    max_batch_size: int | None = option(None, "decoding requests in one step, in rotation; default: all that run")
    long_prefill_token_threshold: int = option(0, "longest chunk of one prompt in a step; 0 = unlimited")
    decode_first: bool = option(True, "decoding requests get a step's tokens before prompts do")
    prefill_max_batch_size: int | None = option(None, "requests that start in one step; default: --max-num-seqs")
    prefill_max_tokens: int | None = option(None, "prompt tokens computed in one step; default: unlimited")

    def __post_init__(self) -> None:
        check_positive(self, "max_batch_size", "prefill_max_batch_size", "prefill_max_tokens")
        check_not_negative(self, "long_prefill_token_threshold")


def check_not_negative(options: object, *names: str) -> None:
    """Raise `ConfigError` for the first of these options that is negative; 0 disables an option."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 0:
            raise ConfigError(f"{name} must be 0 (off) or positive, got {value}")


class PrefillBudget:
    """Rest of one step's `prefill_max_batch_size`, `prefill_max_tokens` and `max_active_requests`.

    A request costs its uncached prompt tokens, at most the context length. Chunks of prompts that started in earlier
    steps use the same budget.
    """

    def __init__(self, config: SchedulerConfig, options: PrefillOptions, view: View) -> None:
        self.tokens_left = options.prefill_max_tokens
        self._view = view
        self._chunked = config.enable_chunked_prefill
        self._most_running = config.max_running
        self._starts_left = min(
            options.prefill_max_batch_size or config.seats,
            view.free_seats,
            config.max_running - len(view.running),
        )
        self._started = 0
        self._granted: int | None = None

    def cost(self, request: Request) -> int:
        return min(self._view.uncached(request), self._view.max_model_len)

    @property
    def starts_left(self) -> int:
        return self._starts_left - self._started

    @property
    def closed(self) -> bool:
        """True if no further request can start in this step."""
        return self.starts_left <= 0 or (self.tokens_left is not None and self.tokens_left <= 0)

    @property
    def next_cause(self) -> Cause:
        """Cause that keeps the next request from starting in this step, if it cannot start."""
        free = min(self._view.free_seats, self._most_running - len(self._view.running)) - self._started
        return Cause.BUDGET if free > 0 else self._view.seat_cause

    def start(self, request: Request) -> bool:
        """Charge a request that starts now. Return False without a charge if it has to wait.

        The first request of a step may exceed the tokens: it runs alone, or its first chunk uses all of them.
        """
        if self.closed:
            return False
        if self.tokens_left is not None:
            cost = self.cost(request)
            if self._started and cost > self.tokens_left:
                return False
            self._granted = min(cost, self.tokens_left) if self._chunked else cost
            self.tokens_left -= self._granted
        self._started += 1
        return True

    def first_chunk(self, room: int) -> int:
        """Return the tokens of the first chunk of the request that `start` last accepted."""
        return room if self._granted is None else min(room, self._granted)

    def expected(self, running: int) -> int:
        """Return the prompt tokens that the step would compute if it had no decoding rows.

        These are `running` tokens of prompts that started earlier, and those of the waiting requests that would start
        in order of arrival.
        """
        view, wanted = self._view, running
        free_tokens = view.free_blocks * view.block_size
        for index, request in enumerate(islice(view.waiting(), max(0, self.starts_left))):
            free_tokens -= len(request.tokens)
            if free_tokens < 0 or wanted >= view.token_budget:
                break
            cost = self.cost(request)
            if index and self.tokens_left is not None and wanted + cost > self.tokens_left:
                break
            wanted += cost
        if self._chunked and self.tokens_left is not None:
            wanted = min(wanted, self.tokens_left)
        return min(wanted, view.token_budget)

    def next_chunk(self, room: int) -> int:
        """Charge a chunk of a prompt that started earlier, and return its tokens: at most `room`."""
        if self.tokens_left is None:
            return room
        taken = max(0, min(room, self.tokens_left))
        self.tokens_left -= taken
        return taken
