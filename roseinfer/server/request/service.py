"""What the routes share: configuration, admission, and, once it is there, the engine with what belongs to it."""

import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from roseinfer.core.clock import Clock, MonotonicClock
from roseinfer.core.config import ServerConfig
from roseinfer.engine.api import Engine, EngineInfo
from roseinfer.server.formats.prompts import PromptEncoder
from roseinfer.server.http.errors import ApiError, model_not_found, unavailable
from roseinfer.server.http.limits import Limits
from roseinfer.server.observe.metrics import EngineMetrics, Exposition, Snapshot, StepMetrics, snapshot
from roseinfer.server.observe.report import SloMetrics
from roseinfer.server.observe.tallies import Tallies
from roseinfer.server.request.length_prediction import LengthPrediction, length_prediction
from roseinfer.server.request.lifecycle import Lifecycle, Room
from roseinfer.server.request.offload import Offload
from roseinfer.server.request.slo_classes import SloClasses, configured_classes
from roseinfer.text.tokenizer import Tokenizer

STALLED_RETRY_S = 10.0

# From what this process has counted to what all of the server has.
Gather = Callable[[Snapshot], Awaitable[Snapshot]]


@dataclass(frozen=True, slots=True)
class Backend:
    """The engine and what can exist only with it."""

    engine: Engine
    info: EngineInfo
    prompts: PromptEncoder
    metrics: EngineMetrics
    slo_metrics: SloMetrics
    lengths: LengthPrediction | None = None
    engine_ids: "itertools.count[int]" = field(default_factory=itertools.count)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.prompts.tokenizer


class Service:
    """One per process that answers requests. Use from the event loop's thread only.

    Who serves beside others gives a `room` that they share, the `share` of the requests that it gets, a `gather` that
    adds what the others have counted, and the `slo_classes` that all have. Raises `ConfigError` for a wrong file.
    """

    def __init__(
        self,
        config: ServerConfig,
        model_name: str,
        clock: Clock | None = None,
        *,
        room: Room | None = None,
        share: float = 1.0,
        gather: Gather | None = None,
        slo_classes: SloClasses | None = None,
    ) -> None:
        self.config = config
        self.model_name = model_name
        self.served_names = config.served_model_name or (model_name,)
        self.created = int(time.time())
        self.clock = clock or MonotonicClock()
        self.limits = Limits.of(config)
        self.slo_classes = configured_classes(config, model_name) if slo_classes is None else slo_classes
        self.lifecycle = Lifecycle(config.max_num_queued_reqs, self.clock, room, share)
        self.tallies = Tallies()
        self._exposition = Exposition(self.tallies, self.served_names[0])
        self._gather = gather
        self.offload = Offload()
        self._backend: Backend | None = None

    def attach(self, engine: Engine, tokenizer: Tokenizer) -> None:
        """From now on requests are taken. Raises `ConfigError` if the chat template does not compile, or if the length
        predictor is none for the model.
        """
        info = engine.info
        prompts = PromptEncoder(tokenizer, self.offload, info.max_model_len, info.vocab_size)
        metrics = EngineMetrics(self.tallies, info, self.served_names[0])
        engine.on_step(StepMetrics(self.tallies, self.served_names[0]).step)
        name = self.served_names[0]
        lengths = length_prediction(self.config.length_predictor, tokenizer, self.offload, self.tallies, name)
        self._backend = Backend(engine, info, prompts, metrics, SloMetrics(self.tallies, name), lengths)
        self.lifecycle.ready()

    @property
    def backend(self) -> Backend:
        """Raises `ApiError` 503 while the engine is loading."""
        if self._backend is None:
            raise self.lifecycle.refusal() or unavailable("loading", "The model is still loading", STALLED_RETRY_S)
        return self._backend

    def ill_health(self) -> ApiError | None:
        """Why `/health` is not 200: loading, or the engine died or hangs."""
        if self._backend is None:
            return unavailable("loading", "The model is still loading", STALLED_RETRY_S)
        health = self._backend.engine.health()
        if not health.alive:
            return unavailable("engine_unhealthy", "The engine has failed", STALLED_RETRY_S, should_retry=False)
        if health.heartbeat_age_s > self.config.stall_timeout:
            message = f"The engine has not moved for {health.heartbeat_age_s:.0f} s"
            return unavailable("engine_unhealthy", message, STALLED_RETRY_S)
        return None

    def refusal(self) -> ApiError | None:
        """Why a new request would be turned away now, or None."""
        return self.lifecycle.refusal() or self.ill_health()

    def admit(self) -> Backend:
        """Raises `ApiError` 503, counted if the queue is full."""
        error = self.refusal()
        if error is not None:
            if error.code == "queue_full":
                self.backend.metrics.refused("max_num_queued_reqs")
            raise error
        return self.backend

    def resolve_model(self, name: str | None) -> str:
        """Raises `ApiError` 404 for a model that is not served."""
        if name is None:
            return self.served_names[0]
        if name not in self.served_names:
            raise model_not_found(name)
        return name

    async def metrics_text(self) -> bytes:
        """What `/metrics` says. Raises what `gather` raises."""
        shown = self.snapshot()
        if self._gather is not None:
            shown = await self._gather(shown)
        return self._exposition.text(shown, None if self._backend is None else self._backend.info)

    def snapshot(self) -> Snapshot:
        """What this process has counted."""
        return snapshot(self.tallies, None if self._backend is None else self._backend.engine)

    def close(self) -> None:
        self.offload.close()
