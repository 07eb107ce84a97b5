"""State that routes share: configuration, admission, and the engine once it is up."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from starlette.types import Scope

from roseinfer.core.adapters import Adapter
from roseinfer.core.clock import Clock, MonotonicClock
from roseinfer.core.config.server import ServerConfig
from roseinfer.engine.api import Engine, EngineInfo, EngineReport, EngineState
from roseinfer.server.http.body import BodyReaders
from roseinfer.server.http.connection import EXTENSION
from roseinfer.server.http.errors import (
    MAX_RETRY_S,
    ApiError,
    draining,
    no_engine_accepts,
    unavailable,
)
from roseinfer.server.http.limits import Limits
from roseinfer.server.http.request_models import RequestParser
from roseinfer.server.request.generation import Observer
from roseinfer.server.request.grammars import GrammarObserver, Grammars
from roseinfer.server.request.inputs import InputEncoder
from roseinfer.server.request.job import UnreadRequest
from roseinfer.server.request.length_prediction import LengthObserver, LengthPrediction, length_prediction
from roseinfer.server.request.lifecycle import Lifecycle, Occupancy, RequestGuard
from roseinfer.server.request.prompts import PromptEncoder
from roseinfer.server.request.slo_classes import SloClasses, configured_classes
from roseinfer.server.request.speech import Speech
from roseinfer.server.text_work.offload import Offload
from roseinfer.server.text_work.texts import Texts
from roseinfer.text.tokenizer import Tokenizer

LOADING_RETRY_S = 2.0
STALLED_RETRY_S = 10.0
# Startup time outside the engine's own count: detection of the death, a new process, imports.
START_MARGIN_S = 3.0


class ObserverFactory(Protocol):
    """Factory of observers, once the engine is up."""

    def attach(self, engine: Engine) -> Observer: ...

    def lengths(self) -> LengthObserver: ...

    def grammars(self) -> GrammarObserver: ...

    def texts(self) -> Callable[[str, float], None]:
        """Return a function that receives the lane and the duration of each text job, waiting included."""
        ...


@dataclass(frozen=True, slots=True)
class Backend:
    """Engine and the objects that need it. `offload`: threads for work during preparation."""

    engine: Engine
    info: EngineInfo
    tokenizer: Tokenizer
    prompts: PromptEncoder
    offload: Offload
    observer: Observer
    grammars: Grammars
    speech: Speech
    on_text: Callable[[str, float], None]
    inputs: InputEncoder
    lengths: LengthPrediction | None = None
    engine_ids: "itertools.count[int]" = field(default_factory=itertools.count)


class Service:
    """State of one served model in one API process. Use from the event loop's thread only.

    With several API processes, `room` counts the requests of all, and `share` is this process's share of them. With
    several models, `title` names the model in the errors of `refusal`, `ill_health` and `unready`.
    Raises `ConfigError` for an invalid file of SLO classes.
    """

    def __init__(
        self,
        config: ServerConfig,
        model_name: str,
        observing: ObserverFactory,
        clock: Clock | None = None,
        *,
        room: Occupancy | None = None,
        share: float = 1.0,
        slo_classes: SloClasses | None = None,
        title: str = "",
    ) -> None:
        self.config = config
        self._title = title
        self.model_name = model_name
        self.served_names = config.served_model_name or (model_name,)
        self.created = int(time.time())
        self.clock = clock or MonotonicClock()
        self.limits = Limits.of(config)
        self.parser = RequestParser(self.limits)
        self.slo_classes = configured_classes(config, self.served_names) if slo_classes is None else slo_classes
        self.lifecycle = Lifecycle(config.max_num_queued_reqs, self.clock, room, share)
        self._observing = observing
        self.bodies = BodyReaders(self._on_refused_body)
        self.offload = Offload()  # for answers
        self._preparation_offload = Offload()
        self.texts: Texts | None = None
        self._backend: Backend | None = None

    async def load_texts(self, tokenizer: Tokenizer) -> None:
        """Start the text processes, which also test the chat template in isolation.

        Raises `ConfigError` if the template is unusable.
        """
        self.texts = Texts(tokenizer, self._on_refused_text, self._on_text)
        await self.texts.start()

    def attach(self, engine: Engine, tokenizer: Tokenizer) -> None:
        """Start to accept requests. Without `load_texts` before, the chat template is trusted.

        Raises `ConfigError` for an unusable chat template, length predictor or tool call parser.
        """
        info = engine.info
        self.texts = texts = self.texts or Texts(tokenizer, self._on_refused_text, self._on_text)
        self.lifecycle.on_end(texts.refuse)
        observer = self._observing.attach(engine)
        path = self.config.length_predictor if info.facts.pooling is None else None  # else there are no outputs
        lengths = length_prediction(path, tokenizer, self._preparation_offload, self._observing.lengths)
        grammars = Grammars(tokenizer, info.facts.vocab_size, info.facts.eos_token_ids, self._observing.grammars())
        variables = self.config.template_variables
        prompts = PromptEncoder(texts, info.facts.max_model_len, info.facts.vocab_size, variables)
        self._backend = Backend(
            engine=engine,
            info=info,
            tokenizer=tokenizer,
            prompts=prompts,
            inputs=InputEncoder(texts, prompts),
            offload=self._preparation_offload,
            observer=observer,
            grammars=grammars,
            speech=Speech.of(tokenizer, self.config),
            on_text=self._observing.texts(),
            lengths=lengths,
        )

    @property
    def loaded(self) -> bool:
        """True once an engine was up."""
        return self._backend is not None

    @property
    def backend(self) -> Backend:
        """Engine and its objects. Raises `ApiError` 503 while it is loading."""
        if self._backend is None:
            raise self.refusal() or _loading()
        return self._backend

    @property
    def chats(self) -> bool:
        """True if the model has a chat template. Raises `ApiError` 503 while it is loading."""
        return self.backend.tokenizer.chat_template is not None

    def ill_health(self) -> ApiError | None:
        """Return the error of `/health`: loading, or a dead or hung engine."""
        return self._titled(self._ill_health())

    def _titled(self, error: ApiError | None) -> ApiError | None:
        if error is not None and self._title:
            error.message = f"{self._title}: {error.message}"
        return error

    def _ill_health(self) -> ApiError | None:
        if self._backend is None:
            return _loading()
        health = self._backend.engine.health()
        if health.final:
            return unavailable("engine_unhealthy", "The engine has failed", STALLED_RETRY_S, should_retry=False)
        if not health.alive:
            wait_s = _until_back_s(self._backend.info, health.heartbeat_age_s)
            return unavailable("engine_unhealthy", "No engine is up; a restart is in progress", wait_s)
        if health.heartbeat_age_s > self.config.stall_timeout:
            message = f"No heartbeat from the engine for {health.heartbeat_age_s:.0f} s"
            return unavailable("engine_unhealthy", message, STALLED_RETRY_S)
        return None

    @property
    def returning(self) -> bool:
        """True while no engine is up but one is being restarted. The supervisor then ends the requests."""
        if self._backend is None:
            return False
        health = self._backend.engine.health()
        return not health.alive and not health.final

    def refusal(self) -> ApiError | None:
        """Return the error for a new request, None if it may enter."""
        return self._titled(self.lifecycle.refusal()) or self.ill_health()

    def unready(self) -> ApiError | None:
        """Return the error of `/ready`: `refusal`, or no engine accepts requests because all drain or are unresponsive.

        With a single engine, requests wait for an unresponsive one.
        """
        error = self.refusal()
        if error is not None or self._backend is None:
            return error
        reports = self._backend.engine.reports()
        taking = (EngineState.READY,) if self._backend.engine.several else (EngineState.READY, EngineState.QUIET)
        if any(report.state in taking for report in reports):
            return None
        wait_s = _until_back_s(self._backend.info, 0.0)
        return self._titled(no_engine_accepts(wait_s))

    def engines(self) -> list[EngineReport]:
        """Return the reports of all engines if there can be several, else none."""
        return self.reports() if self._backend is not None and self._backend.engine.several else []

    def reports(self) -> list[EngineReport]:
        """Return the reports of all engines; none while loading."""
        return [] if self._backend is None else self._backend.engine.reports()

    def admit(self) -> Backend:
        """Return the backend for a new request. Raises `ApiError` 503; a full queue is counted."""
        error = self.refusal()
        if error is not None:
            if error.code == "queue_full":
                self.backend.observer.refused("max_num_queued_reqs")
            raise error
        return self.backend

    def prepare(self, scope: Scope) -> RequestGuard:
        """Return the context manager for the preparation of a request."""
        return RequestGuard(self.lifecycle, scope["extensions"][EXTENSION], self.clock)

    def rejected_unread(self, request_id: str, path: str, arrival_s: float, error: ApiError) -> None:
        """Record a request for which `read` raised `error`. Without an engine there are no records."""
        if error.status == 503 and self._backend is not None:
            visit = UnreadRequest(request_id, path, self.served_names[0])
            self._backend.observer.rejected_unread(visit, self.clock.now() - arrival_s, error)

    def _on_refused_body(self) -> None:
        if self._backend is not None:
            self._backend.observer.refused("max_body_readers")

    def _on_text(self, lane: str, seconds: float) -> None:
        if self._backend is not None:
            self._backend.on_text(lane, seconds)

    def _on_refused_text(self) -> None:
        if self._backend is not None:
            self._backend.observer.refused("text_queue")

    async def wind_down(self, last_words_s: float) -> int:
        """End every request and wait up to `last_words_s` seconds for their last events. Return how many were running.

        Answers that are not sent by then are cut.
        """
        cause = draining()
        ended = self.lifecycle.stop(cause)
        self.bodies.stop(cause)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(last_words_s):
                await self.lifecycle.delivered()
        self.lifecycle.cut(cause)
        return ended

    def adapters(self) -> Mapping[str, Adapter]:
        """Return the LoRA adapters of the model by name; none while it is loading."""
        return {} if self._backend is None else self._backend.engine.adapters()

    def warm_up(self) -> None:
        """Prepare what the first requests would wait for."""
        self.parser.warm_up()
        pooling = self.backend.info.facts.pooling
        if pooling is None:
            self.backend.grammars.warm_up()
        elif pooling.pairs is not None and self.texts is not None:
            self.texts.prepare_pairs(pooling.pairs)

    def close(self) -> None:
        self.offload.close()
        self._preparation_offload.close()
        if self.texts is not None:
            self.texts.close()
        if self._backend is not None:
            self._backend.grammars.close()


def _loading() -> ApiError:
    return unavailable("loading", "The model is still loading", LOADING_RETRY_S)


def _until_back_s(info: EngineInfo, gone_s: float) -> float:
    """Estimate when an engine that has been down for `gone_s` accepts requests, from its last startup time."""
    left_s = info.facts.startup_s.get("engine", 0.0) + START_MARGIN_S - gone_s
    return min(left_s, MAX_RETRY_S) if left_s > 0 else START_MARGIN_S
