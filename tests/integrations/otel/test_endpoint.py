"""Address of the trace collector from option and environment."""

import pytest

from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.integrations.otel import endpoint as module
from roseinfer.integrations.otel.endpoint import with_traces

URL = "http://127.0.0.1:4318"
BASE, TRACES = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: name)


@pytest.mark.parametrize(
    ("given", "environment", "endpoint"),
    [
        (None, {}, None),
        (URL, {}, f"{URL}/v1/traces"),
        (f"{URL}/", {}, f"{URL}/v1/traces"),
        (f"{URL}/v1/traces", {}, f"{URL}/v1/traces"),
        (None, {BASE: f"{URL}/"}, f"{URL}/v1/traces"),
        (None, {TRACES: f"{URL}/mine", BASE: "http://other"}, f"{URL}/mine"),
        (URL, {BASE: "http://other"}, f"{URL}/v1/traces"),
        (None, {BASE: URL, "OTEL_TRACES_EXPORTER": "none"}, None),
        (None, {BASE: URL, "OTEL_SDK_DISABLED": "TRUE"}, None),
        (URL, {"OTEL_SDK_DISABLED": "true"}, None),
        (URL, {PROTOCOL: "http/protobuf", "OTEL_TRACES_EXPORTER": "otlp"}, f"{URL}/v1/traces"),
    ],
)
def test_the_option_comes_before_the_environment(given: str | None, environment: dict[str, str], endpoint: str | None):
    assert with_traces(ServerConfig(otlp_endpoint=given), environment).otlp_endpoint == endpoint


@pytest.mark.parametrize(
    ("given", "environment", "says"),
    [
        ("localhost:4318", {}, "otlp_endpoint: 'localhost:4318/v1/traces' is not a URL"),
        ("http://[::1", {}, "otlp_endpoint"),
        (None, {BASE: "grpc://collector"}, f"{BASE}: 'grpc://collector/v1/traces' is not a URL"),
        (None, {BASE: URL, PROTOCOL: "grpc"}, "'grpc' is not supported"),
        (None, {BASE: URL, "OTEL_TRACES_EXPORTER": "zipkin"}, "'zipkin' is not supported"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(given: str | None, environment: dict[str, str], says: str):
    with pytest.raises(ConfigError, match=says.replace("[", r"\[")):
        with_traces(ServerConfig(otlp_endpoint=given), environment)


@pytest.mark.parametrize(("given", "environment"), [(URL, {}), (None, {BASE: URL})])
def test_without_the_extra_the_error_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, given: str | None, environment: dict[str, str]
):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install .*'[^']*\[otel\]'"):
        with_traces(ServerConfig(otlp_endpoint=given), environment)
    assert with_traces(ServerConfig(), {}).otlp_endpoint is None, "without them nobody needs it"
