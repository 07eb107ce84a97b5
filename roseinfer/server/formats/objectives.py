"""Objectives and scheduling terms of a request: from its body, its headers or its class."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import isfinite

from roseinfer.core.request import RequestMeta
from roseinfer.core.slo import CUSTOM_CLASS, NO_CLASS, Slo
from roseinfer.core.traits import PolicyTraits
from roseinfer.server.formats.pooling.request import PoolingFields
from roseinfer.server.formats.schemas import OneAnswerRequest, SloFields
from roseinfer.server.http.api_keys import Headers
from roseinfer.server.http.errors import bad_request
from roseinfer.server.request.slo_classes import SloClass, SloClasses

TENANT = "x-llm-d-inference-fairness-id"
TTL = "x-llm-d-inference-ttl"
TIMEOUT = "x-timeout-s"
DEADLINE = "x-deadline-ms"
# llm-d's name of each objective and its deprecated alias; the first one given counts.
_TTFT_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
_TPOT_HEADERS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
_KNOWN = frozenset(name.encode() for name in (*_TTFT_HEADERS, *_TPOT_HEADERS, TENANT, TTL, TIMEOUT, DEADLINE))
MAX_TENANT_CHARS = 128
_TENANT = re.compile(rf"[\x21-\x7e]{{1,{MAX_TENANT_CHARS}}}")
_NUMBER = re.compile(r"\d{1,20}(\.\d{0,20})?([eE][+-]?\d{1,3})?")
# Durations in Go's format, as llm-d sends them.
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{0,12})?)(ns|us|µs|ms|s|m|h)")
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}

# Requests of all APIs that set objectives and scheduling terms.
ObjectiveFields = OneAnswerRequest | PoolingFields
_NO_SLO = SloFields.model_construct()
# Field or header, and its value.
GivenValue = tuple[str, float]


@dataclass(frozen=True, slots=True)
class Objectives:
    """Objectives and scheduling terms of one request.

    `meta`: what the engine gets. `first_token_by_s`: deadline of the first token, None = that of the whole request.
    `report`, `why`: add latencies and their explanation to `usage`.
    """

    meta: RequestMeta
    first_token_by_s: float | None
    report: bool
    why: bool


def objectives(
    request: ObjectiveFields,
    headers: Headers,
    arrival_s: float,
    classes: SloClasses,
    model: str,
    key: str | None,
    policy: PolicyTraits,
) -> Objectives:
    """Return the objectives of a request that arrived at `arrival_s` on the monotonic clock.

    `key`: digest of its API key; `policy`: traits of the scheduling policy. The body takes precedence over headers, and
    these over the class. Two different values for one objective are an error. Raises `ApiError` 400 that names the
    field or the header.
    """
    given = _relevant(headers)
    slo_fields = request.slo
    name = _class_name(request, classes, model, key)
    chosen = classes.classes.get(name)
    # Naming another class must not lift what the class of the key or model forbids.
    for holder in (name, default_class(classes, model, key)):
        if holder in classes.classes:
            _check_allowed(request, given, holder, classes.classes[holder])
    timeout_s, ttl_s = _timeout_s(request, given, chosen), _ttl_s(given)
    meta = RequestMeta(
        arrival_s=arrival_s,
        slo=_slo(request, given, chosen),
        deadline_s=None if timeout_s is None else arrival_s + timeout_s,
        tenant=_tenant(given),
        priority=_priority(request.priority, chosen, policy),
        predicted_len=request.pred_output_len,
        hinted=request.pred_output_len is not None,
        cache_salt=request.cache_salt or "",
    )
    return Objectives(
        meta,
        first_token_by_s=None if ttl_s is None else arrival_s + ttl_s,
        report=bool(slo_fields is not None and (slo_fields.report or slo_fields.why)),
        why=bool(slo_fields is not None and slo_fields.why),
    )


def _relevant(headers: Headers) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in headers:
        if name in _KNOWN:
            found.setdefault(name.decode(), value.decode("latin-1").strip())
    return found


def _class_name(request: ObjectiveFields, classes: SloClasses, model: str, key: str | None) -> str:
    named = None if request.slo is None else request.slo.class_
    if named is not None:
        if named != NO_CLASS and named not in classes.classes:
            known = ", ".join(map(repr, list(classes.classes)[:16])) or "none"
            raise bad_request(f"slo.class: unknown class {named[:64]!r} (known: {known})", "slo.class")
        return named
    tier = classes.service_tiers.get(request.service_tier or "")
    return tier or default_class(classes, model, key)


def default_class(classes: SloClasses, model: str, key: str | None) -> str:
    """Return the class of a request that names none: its key's, its model's or `none`. `key`: its digest."""
    return classes.keys.get(key or "") or classes.models.get(model) or NO_CLASS


# --- latency objectives -----------------------------------------------------------------------------------------
def _slo(request: ObjectiveFields, headers: Mapping[str, str], chosen: SloClass | None) -> Slo | None:
    if request.slo is None and request.ttft is None and request.tpot is None and not headers:  # as in most requests
        return None if chosen is None else chosen.slo
    body = request.slo or _NO_SLO
    targets = {
        "ttft_s": _objective_ms(("slo.ttft_ms", body.ttft_ms), ("ttft", request.ttft), headers, _TTFT_HEADERS),
        "tpot_s": _objective_ms(("slo.tpot_ms", body.tpot_ms), ("tpot", request.tpot), headers, _TPOT_HEADERS),
        "e2e_s": _objective_ms(("slo.e2e_ms", body.e2e_ms), ("", None), headers, ()),
    }
    own = {name: ms / 1000 for name, ms in targets.items() if ms is not None}
    if chosen is None:
        return Slo(**own, class_name=CUSTOM_CLASS) if own else None
    if all(getattr(chosen.slo, name) == seconds for name, seconds in own.items()):
        return chosen.slo
    # Metrics of a class must not depend on objectives that clients change.
    return replace(chosen.slo, **own, class_name=CUSTOM_CLASS)


def _objective_ms(
    first: tuple[str, float | None], second: tuple[str, float | None], headers: Mapping[str, str], names: Iterable[str]
) -> float | None:
    """Return the value in ms that the client gives an objective, in body or headers."""
    given_values = [(name, value) for name, value in (first, second) if value is not None]
    header = next((name for name in names if name in headers), None)
    if header is not None:
        given_values.append((header, positive(header, headers[header])))
    return _single_value(given_values)


def _single_value(given_values: list[GivenValue]) -> float | None:
    for name, value in given_values[1:]:
        if value != given_values[0][1]:
            message = f"{given_values[0][0]} ({given_values[0][1]:g}) and {name} ({value:g}) differ: give one of them"
            raise bad_request(message, name)
    return given_values[0][1] if given_values else None


def _positive(name: str, value: float) -> float:
    if not (isfinite(value) and value / 1000 > 0):
        raise bad_request(f"{name} must be positive and finite, got {value:g}", name)
    return value


def positive(name: str, text: str) -> float:
    """Return a positive number. Raises `ApiError` 400."""
    if not _NUMBER.fullmatch(text):
        raise bad_request(f"{name} must be a positive number, got {text[:40]!r}", name)
    return _positive(name, float(text))


# --- time limits ------------------------------------------------------------------------------------------------
def _timeout_s(request: ObjectiveFields, headers: Mapping[str, str], chosen: SloClass | None) -> float | None:
    if request.timeout_s is not None and request.deadline_ms is not None:
        raise bad_request("timeout_s and deadline_ms mean the same: give one of them", "deadline_ms")
    given_values: list[GivenValue] = []
    if request.timeout_s is not None:
        given_values.append(("timeout_s", request.timeout_s))
    if request.deadline_ms is not None:
        given_values.append(("deadline_ms", request.deadline_ms / 1000))
    if TIMEOUT in headers:
        given_values.append((TIMEOUT, positive(TIMEOUT, headers[TIMEOUT])))
    if DEADLINE in headers:
        given_values.append((DEADLINE, positive(DEADLINE, headers[DEADLINE]) / 1000))
    agreed = _single_value(given_values)
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


def _check_allowed(request: ObjectiveFields, headers: Mapping[str, str], name: str, held: SloClass) -> None:
    """Raise `ApiError` 400 for fields and headers that a class forbids."""
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
            message = f"priority is not supported by the scheduling policy {policy.name}"
            raise bad_request(message, "priority", "unsupported_field")
        return 0
    return asked if asked is not None else chosen.priority if chosen is not None else 0
