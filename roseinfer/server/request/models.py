"""Models of a server by name, and the choice of one for each request."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.types import Receive, Scope

from roseinfer.core.adapters import Adapter
from roseinfer.engine.api import EngineReport
from roseinfer.server.http.connection import EXTENSION, ClientConnection
from roseinfer.server.http.errors import ApiError, bad_request, model_not_found
from roseinfer.server.http.request_models import RequestModel
from roseinfer.server.request.lifecycle import Ticket
from roseinfer.server.request.service import Backend, Service

# Key of a request's state: the model that it names.
_CHOSEN = "served_model"


class ModelField(RequestModel):
    model: str | None = Field(None, description="a served model; default: the first one")


Fields = TypeVar("Fields", bound=ModelField)


class ChosenModel(NamedTuple):
    """Model that a request names. `adapter`: set if `name` is that of a LoRA adapter."""

    service: Service
    name: str
    adapter: Adapter | None = None


class ServedModels:
    """All models of a server. The only place where the name of a model is looked up.

    With several models a request must name one. The first model's `Service` reads the bodies of all requests.
    """

    def __init__(self, services: Iterable[Service]) -> None:
        self.services = tuple(services)
        self.first = self.services[0]
        self.parser = self.first.parser
        self.several = len(self.services) > 1
        self._own: dict[str | None, ChosenModel] = {
            name: ChosenModel(service, name) for service in self.services for name in service.served_names
        }
        self.names = tuple(model.name for model in self._own.values())
        self._default = self._own[self.names[0]]
        if not self.several:
            self._own[None] = self._default

    def all_names(self) -> list[str]:
        """Return the names of the models, and those of their LoRA adapters."""
        return [*self.names, *(name for service in self.services for name in service.adapters())]

    def find(self, name: str | None, param: str = "model") -> ChosenModel:
        """Return the model or adapter of this name, or the only model for None.

        Raises `ApiError` 404 for an unknown name, and 400 for None if there are several models.
        """
        return self._own.get(name) or self._find_adapter(name, param)

    def _find_adapter(self, name: str | None, param: str) -> ChosenModel:
        if name is None:
            raise bad_request(f"{param} is required: this server has several models ({_listed(self.names)})", param)
        for service in self.services:
            adapter = service.adapters().get(name)
            if adapter is not None:
                return ChosenModel(service, name, adapter)
        raise model_not_found(name, self.all_names())

    def of(self, body: Mapping[str, Any]) -> ChosenModel:
        """Return the model for the body of a request. A `model` of a wrong type is reported when the body is parsed."""
        name = body.get("model")
        return self.find(name) if name is None or isinstance(name, str) else self._default

    async def read(self, scope: Scope, receive: Receive) -> tuple[ChosenModel, Backend, dict[str, Any]]:
        """Return model, backend and body of a new request. It holds no ticket while its body arrives.

        Raises what `Service.admit` raises, before the first byte and after the last, and what `BodyReaders` and `find`
        raise.
        """
        first = self.first
        backend = self._admit_any() if self.several else first.admit()
        wire: ClientConnection = scope["extensions"][EXTENSION]
        arrived = wire.body_complete  # then reading does not wait, and nothing can change meanwhile
        body = await first.bodies.read_json(scope, receive, first.limits)
        chosen = self.of(body)
        scope["state"][_CHOSEN] = chosen.service
        return chosen, backend if arrived and not self.several else chosen.service.admit(), body

    @asynccontextmanager
    async def preparing(self, request: Request, kind: type[Fields]) -> AsyncIterator[tuple[Service, Backend, Fields]]:
        """Read and parse a request that runs nothing on an engine. It holds a ticket within the context.

        Raises what `read` raises, and `ApiError` 400 for the body.
        """
        chosen, backend, body = await self.read(request.scope, request.receive)
        service = chosen.service
        with Ticket(service.lifecycle), service.prepare(request.scope):
            yield service, backend, self.parser.parse(kind, body)

    def _admit_any(self) -> Backend:
        """Return the backend of a model that accepts requests. Raises the first model's error if none does."""
        service = next((service for service in self.services if service.refusal() is None), self.first)
        return service.admit()

    def rejected_unread(self, state: Mapping[str, Any], path: str, arrival_s: float, error: ApiError) -> None:
        """Record a request for which `read` raised `error`. `state`: of the request."""
        service: Service = state.get(_CHOSEN, self.first)
        service.rejected_unread(state["request_id"], path, arrival_s, error)

    def loaded(self) -> list[Service]:
        """Return the models that are loaded. Raises `ApiError` 503 while none is."""
        found = [service for service in self.services if service.loaded]
        if not found:
            _ = self.first.backend
        return found

    # --- the server as a whole ----------------------------------------------------------------------------------
    def ill_health(self) -> ApiError | None:
        """Return the error of `/health`. It names the models that are loading, dead or hung."""
        return _together([service.ill_health() for service in self.services])

    def unready(self) -> ApiError | None:
        """Return the error of `/ready`, see `Service.unready`. It names the models that accept no requests."""
        return _together([service.unready() for service in self.services])

    def reports(self) -> list[EngineReport]:
        """Return the reports of the engines of all models that are not loading."""
        return [report for service in self.services for report in service.reports()]

    def engines(self) -> list[tuple[Service, EngineReport]]:
        """Return each engine with its model, if there can be several; else an empty list."""
        return [
            (service, report)
            for service in self.services
            for report in (service.reports() if self.several else service.engines())
        ]

    def requests(self) -> int:
        """Return the number of requests in the server."""
        return sum([service.lifecycle.room.all_requests() for service in self.services])

    def begin_drain(self) -> None:
        for service in self.services:
            service.lifecycle.begin_drain()

    async def idle(self) -> None:
        """Wait until no request holds a ticket."""
        for service in self.services:
            await service.lifecycle.idle()

    async def wind_down(self, last_words_s: float) -> int:
        """End every request, as `Service.wind_down`. Return how many were running."""
        return sum(await asyncio.gather(*(service.wind_down(last_words_s) for service in self.services)))

    def close(self) -> None:
        for service in self.services:
            service.close()


def _together(errors: Iterable[ApiError | None]) -> ApiError | None:
    """Return the first error, with the messages of all."""
    found = [error for error in errors if error is not None]
    if len(found) > 1:
        found[0].message = "; ".join(error.message for error in found)
    return found[0] if found else None


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name[:100]) for name in names)
