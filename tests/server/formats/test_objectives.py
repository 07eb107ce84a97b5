"""Objectives of requests, wherever they are set, and their arrival at the engine."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from roseinfer.core.config.server import ServerConfig
from roseinfer.core.slo import Slo
from roseinfer.core.traits import PolicyTraits
from roseinfer.engine.api import GenerateRequest
from roseinfer.server.formats.objectives import TENANT, objectives
from roseinfer.server.formats.schemas import CompletionRequest
from roseinfer.server.http.errors import ApiError
from roseinfer.server.http.request_models import parse
from roseinfer.server.request.slo_classes import SloClasses, parse_slo_classes
from roseinfer.text.tokenizer import Tokenizer
from tests.server.fake_engine import INFO
from tests.server.live import LiveServer
from tests.server.request.test_slo_classes import GOOD, KEY

Serve = Callable[..., LiveServer]
CHAT = Slo(ttft_s=0.5, tpot_s=0.0505, class_name="chat")
CLASSES = parse_slo_classes(
    {
        "classes": {
            "chat": {"ttft_ms": 500, "tpot_ms": 50.5, "priority": -2},
            "batch": {"e2e_ms": 60000, "timeout_s": 90},
            "idle": {"timeout_s": 5},
        },
        "models": {"m": "chat"},
        "service_tiers": {"flex": "batch"},
    }
)


def read(body: dict[str, Any] | None = None, headers: dict[str, str] | None = None, **options: Any) -> Any:
    request = parse(CompletionRequest, {"prompt": "x"} | (body or {}))
    raw = [(name.encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
    given = {"arrival_s": 0.0, "classes": SloClasses(), "model": "m", "key": None, "policy": INFO.policy} | options
    return objectives(request, raw, **given)


def wrong(body: dict[str, Any] | None = None, headers: dict[str, str] | None = None, **options: Any) -> str | None:
    """The field that a 400 names."""
    with pytest.raises(ApiError) as raised:
        read(body, headers, **options)
    assert raised.value.status == 400
    assert raised.value.param is not None and raised.value.param in raised.value.message
    return raised.value.param


# --- what a class forbids ---------------------------------------------------------------------------------------
STRICT = parse_slo_classes(
    {
        "classes": {
            "paid": {
                "ttft_ms": 500,
                "priority": 2,
                "allow_hints": False,
                "allow_priority": False,
                "allow_tenant": False,
            },
            "free": {"ttft_ms": 900},
            "named": {"ttft_ms": 700, "allow_hints": False},
        },
        "models": {"m": "paid", "n": "named"},
    }
)
SAID = [
    ({"pred_output_len": 8}, {}, "pred_output_len"),
    ({"priority": -1}, {}, "priority"),
    ({"priority": 0}, {}, "priority"),
    ({}, {TENANT: "me"}, TENANT),
]


@pytest.mark.parametrize(("body", "headers", "field"), SAID)
@pytest.mark.parametrize("named", [None, "free", "none"])
def test_a_class_forbids_what_cannot_be_checked(body, headers, field, named) -> None:
    """Also to a request that names another class: that of its model, or key, holds all the same."""
    slo = {} if named is None else {"slo": {"class": named}}
    assert wrong(body | slo, headers, classes=STRICT) == field
    assert read(body | slo, headers, classes=STRICT, model="other") is not None


def test_a_named_class_forbids_too_and_says_which() -> None:
    with pytest.raises(ApiError, match="pred_output_len is not allowed in class named") as raised:
        read({"pred_output_len": 8, "slo": {"class": "named"}}, classes=STRICT, model="other")
    assert raised.value.code == "unsupported_field"
    assert read({"pred_output_len": 8, "slo": {"class": "free"}}, classes=STRICT, model="other").meta.predicted_len == 8


@pytest.mark.parametrize(("model", "named"), [("m", "named"), ("n", "paid")])
def test_of_two_classes_that_forbid_a_field_the_requested_one_is_named(model: str, named: str) -> None:
    with pytest.raises(ApiError, match=f"pred_output_len is not allowed in class {named}"):
        read({"pred_output_len": 8, "slo": {"class": named}}, classes=STRICT, model=model)


def test_the_priority_of_the_class_itself_may_be_said() -> None:
    assert read({"priority": 2}, classes=STRICT).meta.priority == read(classes=STRICT).meta.priority == 2


def test_a_hint_of_the_client_is_known_as_one() -> None:
    assert read({"pred_output_len": 8}).meta.hinted
    assert not read().meta.hinted


# --- where it may be said ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        ({}, {}, None), ({"slo": {}}, {}, None), ({"slo": None, "ttft": None}, {}, None),
        ({"slo": {"ttft_ms": None}}, {}, None),
        ({"slo": {"ttft_ms": 200}}, {}, Slo(ttft_s=0.2)), ({"ttft": 200.0}, {}, Slo(ttft_s=0.2)),
        ({"slo": {"tpot_ms": 5}, "ttft": 1}, {}, Slo(ttft_s=0.001, tpot_s=0.005)), ({"tpot": 5}, {}, Slo(tpot_s=0.005)),
        ({"slo": {"e2e_ms": 1e4}}, {}, Slo(e2e_s=10.0)),
        ({}, {"x-llm-d-slo-ttft-ms": "200"}, Slo(ttft_s=0.2)), ({}, {"x-slo-ttft-ms": " 2e2 "}, Slo(ttft_s=0.2)),
        ({}, {"x-slo-tpot-ms": "0.5", "x-slo-ttft-ms": "1"}, Slo(ttft_s=0.001, tpot_s=0.0005)),
        ({}, {"x-slo-ttft-ms": "1", "x-llm-d-slo-ttft-ms": "200"}, Slo(ttft_s=0.2)),
        ({"slo": {"ttft_ms": 200}, "ttft": 200}, {"x-slo-ttft-ms": "200.0"}, Slo(ttft_s=0.2)),
        ({"slo": {"ttft_ms": 200}}, {"x-slo-tpot-ms": "7"}, Slo(ttft_s=0.2, tpot_s=0.007)),
    ],
)  # fmt: skip
def test_body_and_headers(body: dict[str, Any], headers: dict[str, str], expected: Slo | None) -> None:
    assert read(body, headers).meta.slo == (None if expected is None else replace(expected, class_name="custom"))


@pytest.mark.parametrize(
    ("body", "headers", "name"),
    [
        ({"slo": {"ttft_ms": 200}, "ttft": 201}, {}, "ttft"), ({"slo": {"tpot_ms": 2}, "tpot": 3}, {}, "tpot"),
        ({"ttft": 200}, {"x-slo-ttft-ms": "201"}, "x-slo-ttft-ms"),
        ({"slo": {"tpot_ms": 200}}, {"x-llm-d-slo-tpot-ms": "201"}, "x-llm-d-slo-tpot-ms"),
        ({"timeout_s": 2}, {"x-timeout-s": "3"}, "x-timeout-s"),
        ({"timeout_s": 2}, {"x-deadline-ms": "2001"}, "x-deadline-ms"),
        ({"timeout_s": 2, "deadline_ms": 2000}, {}, "deadline_ms"),
    ],
)  # fmt: skip
def test_two_values_for_one_thing_contradict_each_other(body: Any, headers: dict[str, str], name: str) -> None:
    assert wrong(body, headers) == name


NONSENSE = (0, -1, -0.0, 1e-323, "5", True, [5], {}, 10**400, float("nan"), float("inf"), -float("inf"))


@pytest.mark.parametrize("value", NONSENSE)
@pytest.mark.parametrize(
    "name", ["slo.ttft_ms", "slo.tpot_ms", "slo.e2e_ms", "ttft", "tpot", "timeout_s", "deadline_ms"]
)
def test_nonsense_in_the_body_is_named(name: str, value: Any) -> None:
    outer, _, inner = name.partition(".")
    assert wrong({outer: {inner: value} if inner else value}) == name


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"slo": {"ttfb_ms": 3}}, "slo.ttfb_ms"), ({"slo": {"class": 3}}, "slo.class"), ({"slo": 3}, "slo"),
        ({"slo": {"class": "nope"}}, "slo.class"), ({"slo": {"class": ""}}, "slo.class"),
        ({"slo": {"class": "custom"}}, "slo.class"), ({"slo": {"report": 1}}, "slo.report"),
        ({"slo": {"class_": "chat"}}, "slo.class_"),
        ({"pred_output_len": 0}, "pred_output_len"), ({"pred_output_len": 2**31}, "pred_output_len"),
        ({"pred_output_len": 1.5}, "pred_output_len"), ({"pred_output_len": True}, "pred_output_len"),
        ({"priority": 2**63}, "priority"), ({"priority": -(2**63) - 1}, "priority"), ({"priority": "1"}, "priority"),
        ({"priority": 1.0}, "priority"), ({"service_tier": 3}, "service_tier"),
    ],
)  # fmt: skip
def test_other_nonsense_is_named(body: dict[str, Any], name: str) -> None:
    assert wrong(body, classes=CLASSES) == name


SLO_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms", "x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")


@pytest.mark.parametrize("name", [*SLO_HEADERS, "x-timeout-s", "x-deadline-ms", "x-llm-d-inference-ttl"])
@pytest.mark.parametrize(
    "value", ["", "0", "-1", "nan", "inf", "Infinity", "1e999", "1e-400", "1_000", "0x10", "5 5", "five", "٣".encode()]
)
def test_nonsense_in_a_header_is_named(name: str, value: Any) -> None:
    text = value if isinstance(value, str) else value.decode("latin-1")
    assert wrong(headers={name: text}) == name


def test_any_text_in_a_header_is_a_number_or_a_400() -> None:
    random_ = random.Random(5)
    for _ in range(3000):
        text = "".join(random_.choices("0123456789.eE+-_ msnhinfaxé", k=random_.randint(0, 12)))
        for name in ("x-slo-ttft-ms", "x-llm-d-inference-ttl"):
            try:
                found = read(headers={name: text})
            except ApiError as error:
                assert error.status == 400 and error.param == name
            else:
                seconds = found.first_token_by_s if found.meta.slo is None else found.meta.slo.ttft_s
                assert seconds is not None and 0 < seconds < float("inf")


# --- classes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, CHAT), ({"slo": {"class": "chat"}}, CHAT), ({"slo": {"class": "none"}}, None),
        ({"slo": {"class": "batch"}}, Slo(e2e_s=60.0, class_name="batch")),
        ({"service_tier": "flex"}, Slo(e2e_s=60.0, class_name="batch")), ({"service_tier": "auto"}, CHAT),
        ({"service_tier": "flex", "slo": {"class": "chat"}}, CHAT),
        ({"ttft": 500}, CHAT),
        ({"ttft": 400}, Slo(ttft_s=0.4, tpot_s=0.0505, class_name="custom")),
        ({"slo": {"class": "batch", "tpot_ms": 9}}, Slo(tpot_s=0.009, e2e_s=60.0, class_name="custom")),
        ({"slo": {"class": "none", "tpot_ms": 9}}, Slo(tpot_s=0.009, class_name="custom")),
        ({"slo": {"class": "idle"}}, Slo(class_name="idle")),
    ],
)  # fmt: skip
def test_what_a_request_does_not_say_its_class_says(body: dict[str, Any], expected: Slo | None) -> None:
    assert read(body, classes=CLASSES).meta.slo == expected


def test_limits_and_priorities_of_a_class() -> None:
    batch, chat = {"slo": {"class": "batch"}}, {"slo": {"class": "chat"}}
    assert read(batch, classes=CLASSES).meta.deadline_s == 90.0
    assert read(batch | {"timeout_s": 3}, classes=CLASSES).meta.deadline_s == 3.0
    assert read(batch, {"x-deadline-ms": "500"}, classes=CLASSES).meta.deadline_s == 0.5
    assert read(chat, classes=CLASSES).meta.priority == -2
    assert read(chat | {"priority": 0}, classes=CLASSES).meta.priority == 0


@pytest.mark.parametrize("policy", ["fifo", "pack", "sarathi", "qoserve", "scorpio"])
def test_priorities_that_nobody_heeds_are_refused(policy: str) -> None:
    with pytest.raises(ApiError, match=policy) as raised:
        read({"priority": 1}, policy=PolicyTraits(policy))
    assert (raised.value.param, raised.value.code) == ("priority", "unsupported_field")
    assert read({"priority": 0}, policy=PolicyTraits(policy)).meta.priority == 0
    # The same file serves to compare policies.
    assert read({"slo": {"class": "chat"}}, classes=CLASSES, policy=PolicyTraits(policy)).meta.priority == 0
    assert read({"slo": {"class": "chat"}}, classes=CLASSES, policy=PolicyTraits(policy)).meta.slo == CHAT


# --- the others -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1500ms", 1.5), ("1m30s", 90.0), ("1.5h", 5400.0), ("+2s", 2.0), ("3", 3.0), ("0.25", 0.25), ("5µs", 5e-6)],
)
def test_time_to_live_is_a_duration_as_gateways_write_it(text: str, seconds: float) -> None:
    assert read(headers={"x-llm-d-inference-ttl": text}).first_token_by_s == pytest.approx(seconds)


def test_tenants() -> None:
    name = "x-llm-d-inference-fairness-id"
    assert read().meta.tenant == read(headers={name: ""}).meta.tenant == ""
    assert read(headers={name: "team-a"}).meta.tenant == "team-a"
    for bad in ("a b", "é", "a" * 129):
        assert wrong(headers={name: bad}) == name


# --- over HTTP --------------------------------------------------------------------------------------------------


def seen(server: LiveServer) -> GenerateRequest:
    return server.engine.requests[-1]


@pytest.mark.parametrize("chat", [False, True])
def test_all_of_it_reaches_the_engine(server: LiveServer, client: openai.OpenAI, chat: bool) -> None:
    headers = {"x-llm-d-slo-tpot-ms": "40", "x-llm-d-inference-fairness-id": "team-a"}
    body = {"slo": {"ttft_ms": 700}, "pred_output_len": 9, "priority": -3, "timeout_s": 20}
    options: Any = {"model": "fake", "extra_body": body, "extra_headers": headers}
    if chat:
        client.chat.completions.create(messages=[{"role": "user", "content": "x"}], **options)
    else:
        client.completions.create(prompt="x", **options)
    request = seen(server).prompt.meta
    assert request.slo == Slo(ttft_s=0.7, tpot_s=0.04, class_name="custom")
    assert (request.tenant, request.priority, request.predicted_len) == ("team-a", -3, 9)
    assert request.arrival_s is not None and request.deadline_s == pytest.approx(request.arrival_s + 20)


@pytest.mark.parametrize(("slo", "kept"), [({"tpot_ms": 1}, None), ({"tpot_ms": 1, "ttft_ms": 9}, Slo(ttft_s=0.009))])
def test_a_single_token_has_no_tpot_for_router_and_engine(
    server: LiveServer, slo: dict[str, Any], kept: Slo | None
) -> None:
    server.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "slo": slo})
    found = seen(server).prompt.meta.slo
    assert found == (None if kept is None else replace(kept, class_name="custom"))


def test_a_plain_request_is_promised_nothing(server: LiveServer) -> None:
    assert "slo" not in server.post("/v1/completions", {"prompt": "x"}).json()["usage"]
    request = seen(server).prompt.meta
    assert (request.slo, request.tenant, request.priority) == (None, "", 0)
    assert request.deadline_s is None and request.predicted_len is None


def test_wrong_objectives_are_a_400_before_anything_else(server: LiveServer) -> None:
    for stream in (False, True):
        answer = server.post("/v1/completions", {"prompt": "x", "slo": {"ttft_ms": -1}, "stream": stream})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "slo.ttft_ms"
    assert not server.engine.requests


def test_a_tier_that_says_nothing_is_named_among_the_ignored(server: LiveServer) -> None:
    answer = server.post("/v1/completions", {"prompt": "x", "service_tier": "flex"})
    assert answer.json()["warnings"] == ["service_tier"]


@pytest.fixture
def keyed(serve: Serve, tmp_path: Path) -> LiveServer:
    file = tmp_path / "classes.toml"
    file.write_text(GOOD)
    return serve(slo_classes=str(file), api_key=(KEY, "other"), served_model_name=("tiny", "second"))


def test_classes_by_key_and_by_model(keyed: LiveServer) -> None:
    def slo_class(key: str, **body: Any) -> str | None:
        answer = keyed.post("/v1/completions", {"prompt": "x"} | body, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 200
        slo = seen(keyed).prompt.meta.slo
        return None if slo is None else slo.class_name

    assert slo_class(KEY) == slo_class(KEY, model="second") == "batch.night"
    assert slo_class("other") == slo_class("other", model="tiny") == "chat"
    assert slo_class("other", model="second") is None
    assert slo_class(KEY, slo={"class": "chat"}) == "chat"
    assert keyed.post("/v1/completions", {"prompt": "x"}).status_code == 401


@pytest.fixture
def fifo(tokenizer: Tokenizer) -> Iterator[LiveServer]:
    live = LiveServer(tokenizer, ServerConfig())
    live.info = replace(INFO, policy=PolicyTraits("fifo"))
    with live as server:
        yield server


def test_a_policy_without_objectives_takes_them_all_the_same(fifo: LiveServer) -> None:
    answer = fifo.post("/v1/completions", {"prompt": "x", "slo": {"ttft_ms": 1e6, "report": True}})
    assert answer.json()["usage"]["slo"]["met"] is True
    assert fifo.post("/v1/completions", {"prompt": "x", "priority": 1}).json()["error"]["param"] == "priority"
