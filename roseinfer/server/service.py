"""What the routes share: configuration, admission, and, once it is there, the engine with what belongs to it."""

import itertools
import time
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from roseinfer.core.clock import Clock, MonotonicClock
from roseinfer.core.config import ServerConfig
from roseinfer.engine.api import Engine, EngineInfo
from roseinfer.server.errors import ApiError, model_not_found, unavailable
from roseinfer.server.lifecycle import Lifecycle
from roseinfer.server.limits import Limits
from roseinfer.server.metrics import EngineMetrics
from roseinfer.server.offload import Offload
from roseinfer.server.prompts import PromptEncoder
from roseinfer.text.tokenizer import Tokenizer

STALLED_RETRY_S = 10.0


@dataclass(frozen=True, slots=True)
class Backend:
    """The engine and what can exist only with it."""

    engine: Engine
    info: EngineInfo
    prompts: PromptEncoder
    metrics: EngineMetrics
    engine_ids: "itertools.count[int]" = field(default_factory=itertools.count)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.prompts.tokenizer


class Service:
    """One per server. Use from the event loop's thread only."""

    def __init__(self, config: ServerConfig, model_name: str, clock: Clock | None = None) -> None:
        self.config = config
        self.model_name = model_name
        self.served_names = config.served_model_name or (model_name,)
        self.created = int(time.time())
        self.clock = clock or MonotonicClock()
        self.limits = Limits.of(config)
        self.lifecycle = Lifecycle(config.max_num_queued_reqs, self.clock)
        self.registry = CollectorRegistry()
        self.offload = Offload()
        self._backend: Backend | None = None

    def attach(self, engine: Engine, tokenizer: Tokenizer) -> None:
        """From now on requests are taken. Raises `ConfigError` if the chat template does not compile."""
        info = engine.info
        prompts = PromptEncoder(tokenizer, self.offload, info.max_model_len, info.vocab_size)
        metrics = EngineMetrics(self.registry, engine, self.served_names[0])
        engine.on_step(metrics.step)
        self._backend = Backend(engine, info, prompts, metrics)
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

    def close(self) -> None:
        self.offload.close()
