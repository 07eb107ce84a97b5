"""What a request was promised, and by whom: its body, its headers, or the class that it belongs to."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Protocol

from roseinfer.core.request import RequestMeta
from roseinfer.core.slo import Slo
from roseinfer.core.traits import PolicyTraits
from roseinfer.server.http.errors import bad_request
from roseinfer.server.request.slo_classes import CUSTOM, NO_CLASS, SloClass, SloClasses

TENANT = "x-llm-d-inference-fairness-id"
TTL = "x-llm-d-inference-ttl"
TIMEOUT = "x-timeout-s"
DEADLINE = "x-deadline-ms"
# For each objective llm-d's name and its deprecated alias: of several the first counts.
_TTFT_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
_TPOT_HEADERS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
_KNOWN = frozenset(name.encode() for name in (*_TTFT_HEADERS, *_TPOT_HEADERS, TENANT, TTL, TIMEOUT, DEADLINE))
MAX_TENANT_CHARS = 128
MAX_PREDICTED_LEN = 2**31 - 1
_TENANT = re.compile(rf"[\x21-\x7e]{{1,{MAX_TENANT_CHARS}}}")
_NUMBER = re.compile(r"\d{1,20}(\.\d{0,20})?([eE][+-]?\d{1,3})?")
# As Go writes durations, which is how llm-d sends them.
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{0,12})?)(ns|us|µs|ms|s|m|h)")
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}

Headers = Iterable[tuple[bytes, bytes]]
# Where the client wrote a value, and the value.
Said = tuple[str, float]


class SloWishes(Protocol):
    """The latency objectives in a body, in ms; None = not given. `class_` names a class of the server's."""

    @property
    def ttft_ms(self) -> float | None: ...
    @property
    def tpot_ms(self) -> float | None: ...
    @property
    def e2e_ms(self) -> float | None: ...
    @property
    def class_(self) -> str | None: ...
    @property
    def report(self) -> bool | None: ...
    @property
    def why(self) -> bool | None: ...


class Wishes(Protocol):
    """As much of a body, in whatever format, as says what a request wants to be promised. None = not given."""

    @property
    def slo(self) -> SloWishes | None: ...
    @property
    def ttft(self) -> float | None: ...
    @property
    def tpot(self) -> float | None: ...
    @property
    def pred_output_len(self) -> int | None: ...
    @property
    def timeout_s(self) -> float | None: ...
    @property
    def deadline_ms(self) -> float | None: ...
    @property
    def service_tier(self) -> str | None: ...
    @property
    def priority(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class _NothingSaid:
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Objectives:
    """`slo` is None if the request belongs to no class and was promised nothing. `timeout_s`: from arrival to the end;
    `ttl_s`: from arrival to the first token. `predicted_len`: output tokens, as the client guesses. `report`: whether
    the client wants to know how its objectives were kept, `why`: and why.
    """

    slo: Slo | None = None
    tenant: str = ""
    priority: int = 0
    timeout_s: float | None = None
    ttl_s: float | None = None
    predicted_len: int | None = None
    report: bool = False
    why: bool = False

    def first_token_by_s(self, arrival_s: float) -> float | None:
        """Return the time at which a request without a token ends; None = never. `arrival_s`: its arrival."""
        if self.timeout_s is None and self.ttl_s is None:
            return None
        return arrival_s + min(seconds for seconds in (self.timeout_s, self.ttl_s) if seconds is not None)

    def meta(self, arrival_s: float, cache_salt: str) -> RequestMeta:
        """What the engine is told, of a request that arrived at `arrival_s`, in seconds on the monotonic clock."""
        return RequestMeta(
            arrival_s=arrival_s,
            slo=self.slo,
            deadline_s=None if self.timeout_s is None else arrival_s + self.timeout_s,
            tenant=self.tenant,
            priority=self.priority,
            predicted_len=self.predicted_len,
            hinted=self.predicted_len is not None,
            cache_salt=cache_salt,
        )


def objectives(
    request: Wishes, headers: Headers, classes: SloClasses, model: str, key: str | None, policy: PolicyTraits
) -> Objectives:
    """`key`: digest of the request's API key; `policy`: what the scheduling policy makes of requests.

    What the body says goes before the headers, and those before the class; a client that says two things of one
    objective contradicts itself. Raises `ApiError` 400 that names the field or the header.
    """
    given = _relevant(headers)
    wishes = request.slo
    name = _class_name(request, classes, model, key)
    chosen = classes.classes.get(name)
    # Naming another class must not lift what the class of the key or model forbids.
    for holder in {name, default_class(classes, model, key)} & classes.classes.keys():
        _check_allowed(request, given, holder, classes.classes[holder])
    return Objectives(
        slo=_slo(request, given, chosen),
        tenant=_tenant(given),
        priority=_priority(request.priority, chosen, policy),
        timeout_s=_timeout_s(request, given, chosen),
        ttl_s=_ttl_s(given),
        predicted_len=request.pred_output_len,
        report=bool(wishes is not None and (wishes.report or wishes.why)),
        why=bool(wishes is not None and wishes.why),
    )


def _relevant(headers: Headers) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in headers:
        if name in _KNOWN:
            found.setdefault(name.decode(), value.decode("latin-1").strip())
    return found


def _class_name(request: Wishes, classes: SloClasses, model: str, key: str | None) -> str:
    named = None if request.slo is None else request.slo.class_
    if named is not None:
        if named != NO_CLASS and named not in classes.classes:
            known = ", ".join(map(repr, list(classes.classes)[:16])) or "none at all"
            raise bad_request(f"slo.class: the server has no class {named[:64]!r}, but {known}", "slo.class")
        return named
    tier = classes.service_tiers.get(request.service_tier or "")
    return tier or default_class(classes, model, key)


def default_class(classes: SloClasses, model: str, key: str | None) -> str:
    """The class of a request that names none: its key's, else its model's, else `none`. `key`: its digest."""
    return classes.keys.get(key or "") or classes.models.get(model) or NO_CLASS


# --- latency objectives -----------------------------------------------------------------------------------------
def _slo(request: Wishes, headers: Mapping[str, str], chosen: SloClass | None) -> Slo | None:
    if request.slo is None and request.ttft is None and request.tpot is None and not headers:  # as in most requests
        return None if chosen is None else chosen.slo
    body = request.slo or _NothingSaid()
    targets = {
        "ttft_s": _said(("slo.ttft_ms", body.ttft_ms), ("ttft", request.ttft), headers, _TTFT_HEADERS),
        "tpot_s": _said(("slo.tpot_ms", body.tpot_ms), ("tpot", request.tpot), headers, _TPOT_HEADERS),
        "e2e_s": _said(("slo.e2e_ms", body.e2e_ms), ("", None), headers, ()),
    }
    own = {name: ms / 1000 for name, ms in targets.items() if ms is not None}
    if chosen is None:
        return Slo(**own, class_name=CUSTOM) if own else None
    if all(getattr(chosen.slo, name) == seconds for name, seconds in own.items()):
        return chosen.slo
    # Otherwise what is said of a class would depend on what clients make of it.
    return replace(chosen.slo, **own, class_name=CUSTOM)


def _said(
    first: tuple[str, float | None], second: tuple[str, float | None], headers: Mapping[str, str], names: Iterable[str]
) -> float | None:
    """The one value, in ms, that the client gives an objective in whatever places."""
    said = [(name, value) for name, value in (first, second) if value is not None]
    header = next((name for name in names if name in headers), None)
    if header is not None:
        said.append((header, positive(header, headers[header])))
    return _agreed(said)


def _agreed(said: list[Said]) -> float | None:
    for name, value in said[1:]:
        if value != said[0][1]:
            message = f"{said[0][0]} is {said[0][1]:g} and {name} is {value:g}: give one of them"
            raise bad_request(message, name)
    return said[0][1] if said else None


def _positive(name: str, value: float) -> float:
    if not (isfinite(value) and value / 1000 > 0):
        raise bad_request(f"{name} must be positive and finite, got {value:g}", name)
    return value


def positive(name: str, text: str) -> float:
    """Raises `ApiError` 400 for a text that is no positive number."""
    if not _NUMBER.fullmatch(text):
        raise bad_request(f"{name} must be a positive number, got {text[:40]!r}", name)
    return _positive(name, float(text))


# --- time limits ------------------------------------------------------------------------------------------------
def _timeout_s(request: Wishes, headers: Mapping[str, str], chosen: SloClass | None) -> float | None:
    if request.timeout_s is not None and request.deadline_ms is not None:
        raise bad_request("timeout_s and deadline_ms say the same: give one of them", "deadline_ms")
    said: list[Said] = []
    if request.timeout_s is not None:
        said.append(("timeout_s", request.timeout_s))
    if request.deadline_ms is not None:
        said.append(("deadline_ms", request.deadline_ms / 1000))
    if TIMEOUT in headers:
        said.append((TIMEOUT, positive(TIMEOUT, headers[TIMEOUT])))
    if DEADLINE in headers:
        said.append((DEADLINE, positive(DEADLINE, headers[DEADLINE]) / 1000))
    agreed = _agreed(said)
    return agreed if agreed is not None or chosen is None else chosen.timeout_s


def _ttl_s(headers: Mapping[str, str]) -> float | None:
    text = headers.get(TTL)
    if text is None:
        return None
    if _NUMBER.fullmatch(text):
        return positive(TTL, text)
    parts = _DURATION.findall(text) if len(text) <= 100 else []
    if not parts or "".join(number + unit for number, unit in parts) != text.removeprefix("+"):
        raise bad_request(f"{TTL} must be a duration such as 1500ms or 1m30s, got {text[:40]!r}", TTL)
    return _positive(TTL, sum(float(number) * _UNITS_S[unit] for number, unit in parts))


def _check_allowed(request: Wishes, headers: Mapping[str, str], name: str, held: SloClass) -> None:
    """Raises `ApiError` 400 for what a class forbids its requests to say."""
    forbidden = {
        "pred_output_len": not held.allow_hints and request.pred_output_len is not None,
        "priority": not held.allow_priority and request.priority not in (None, held.priority),
        TENANT: not held.allow_tenant and TENANT in headers,
    }
    for field, broken in forbidden.items():
        if broken:
            raise bad_request(f"{field} is not allowed in class {name}", field, "unsupported_field")


# --- the others -------------------------------------------------------------------------------------------------
def _tenant(headers: Mapping[str, str]) -> str:
    tenant = headers.get(TENANT, "")
    if tenant and not _TENANT.fullmatch(tenant):
        raise bad_request(f"{TENANT} must be 1 to {MAX_TENANT_CHARS} visible ASCII characters", TENANT)
    return tenant


def _priority(asked: int | None, chosen: SloClass | None, policy: PolicyTraits) -> int:
    if not policy.priorities:
        if asked:
            message = f"priority is not supported: the scheduling policy {policy.name} knows no priorities"
            raise bad_request(message, "priority", "unsupported_field")
        return 0
    return asked if asked is not None else chosen.priority if chosen is not None else 0
