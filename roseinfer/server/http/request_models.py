"""Base of request bodies: parsing, error messages, and bounds that follow the server's options."""

import json
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar, cast, get_args

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, create_model
from pydantic_core import CoreSchema, ErrorDetails

from roseinfer.server.http.errors import ApiError, bad_request
from roseinfer.server.http.limits import Limits

MAX_LISTED_ERRORS = 10
MAX_ERROR_CHARS = 300
MAX_VALUE_CHARS = 32
MAX_VALUE_BITS = 100  # of integers; Python refuses to write those of thousands of digits

_limits: ContextVar[Limits | None] = ContextVar("_limits", default=None)


@dataclass(frozen=True, slots=True)
class FollowsOptions:
    """Annotation: constraints of a value that follow the server's options. Applied by `RequestParser`."""

    constraints: Callable[[Limits], dict[str, Any]]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        limits = _limits.get()
        if limits is not None:
            return cast(CoreSchema, {**schema, **self.constraints(limits)})
        return schema


class RequestModel(BaseModel):
    """Base of bodies and their parts. `RequestParser` builds validators, with its bounds; at import they would take as
    long again, in each process.
    """

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=(), defer_build=True)


Model = TypeVar("Model", bound=RequestModel)


class RequestParser:
    """Parser of request bodies with the bounds of one server's options."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._models: dict[type[RequestModel], type[RequestModel]] = {}
        self._expected: list[type[RequestModel]] = []

    def expect(self, kind: type[RequestModel]) -> None:
        """Add `kind` to the models of `warm_up`."""
        self._expected.append(kind)

    def warm_up(self) -> None:
        """Build the expected models: each would delay its first request, and all others, by some 8 ms."""
        for kind in self._expected:
            self.model(kind)

    def model(self, kind: type[Model]) -> type[Model]:
        """Return a subclass of `kind` with all bounds."""
        found = self._models.get(kind)
        if found is None:
            token = _limits.set(self._limits)
            try:
                found = create_model(kind.__name__, __base__=kind, __module__=kind.__module__, __doc__=kind.__doc__)
                found.model_rebuild()
            finally:
                _limits.reset(token)
            self._models[kind] = found
        return found  # type: ignore[return-value]

    def parse(self, kind: type[Model], body: dict[str, Any]) -> Model:
        """Return the fields of a body. Raises `ApiError` 400 naming them."""
        return parse(self.model(kind), body)


def parse(kind: type[Model], body: dict[str, Any]) -> Model:
    """Return the fields of a body, without the bounds of the server's options. Raises `ApiError` 400 naming them."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _as_bad_request(kind, error) from None


def unknown_fields(request: RequestModel) -> dict[str, Any]:
    """Return the fields that no schema names, without nulls."""
    extra = request.model_extra
    return {name: value for name, value in extra.items() if value is not None} if extra else {}


def _as_bad_request(kind: type[RequestModel], error: ValidationError) -> ApiError:
    details = _relevant(error.errors(include_url=False, include_context=False))
    listed = list(dict.fromkeys(f"{_place(d['loc'])}: {_message(kind, d)}"[:MAX_ERROR_CHARS] for d in details))
    if len(listed) > MAX_LISTED_ERRORS:
        listed[MAX_LISTED_ERRORS:] = [f"and {len(listed) - MAX_LISTED_ERRORS} more"]
    loc = details[0]["loc"]
    param = _place(loc) if loc[:1] == ("slo",) else str(loc[0])[:100] if loc else None
    return bad_request("; ".join(listed), param)


def _relevant(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Drop errors of union branches of another type if a branch of the right type has an error of its own."""
    own = {detail["loc"][:1] for detail in details if not detail["type"].endswith("_type")}
    return [detail for detail in details if not detail["type"].endswith("_type") or detail["loc"][:1] not in own]


def _message(kind: type[RequestModel], detail: ErrorDetails) -> str:
    if detail["type"] in ("model_type", "dict_type"):
        return "Input should be a valid object"
    if detail["type"] != "extra_forbidden":
        return detail["msg"] + _got(detail)
    within = get_args(kind.model_fields[str(detail["loc"][0])].annotation)
    models = [each for each in within if isinstance(each, type) and issubclass(each, BaseModel)]
    known = [field.alias or name for model in models for name, field in model.model_fields.items()]
    return f"unknown field; the fields are {', '.join(known)}"


def _got(detail: ErrorDetails) -> str:
    """Return the end of a message that shows a wrong number or switch; empty for a text and whatever is long."""
    value = detail["input"]
    if isinstance(value, str) and len(value) > MAX_VALUE_CHARS:
        return ""
    if isinstance(value, str) and detail["type"].startswith(("int_", "float_", "bool_")):
        shown = repr(value)
    elif isinstance(value, int | float) and not (isinstance(value, int) and value.bit_length() > MAX_VALUE_BITS):
        shown = json.dumps(value)
    else:
        return ""
    return f", got {shown}" if len(shown) <= MAX_VALUE_CHARS else ""


# Names that pydantic gives to the branches of a union in the place of an error.
_BRANCHES = frozenset({"str", "constrained-str", "int", "constrained-int", "float", "bool"})


def _place(loc: tuple[int | str, ...]) -> str:
    parts = [str(part)[:40] for part in loc if part not in _BRANCHES and "[" not in str(part)]
    return ".".join(parts[:5])
