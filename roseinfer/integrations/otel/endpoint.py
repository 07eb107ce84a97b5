"""Address of the trace collector: from the option, else from OpenTelemetry's environment variables."""

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from urllib.parse import urlsplit

from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.core.extras import install_command

# opentelemetry.io/docs/specs/otel/protocol/exporter: the first is used as is; the signal's path is appended to the
# second.
TRACES_VARIABLE, BASE_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"
PATH = "/v1/traces"


def with_traces(server: ServerConfig, environment: Mapping[str, str]) -> ServerConfig:
    """Return the options with the collector's address, or None if there is none.

    Raises `ConfigError` for an unsupported address or protocol, or if the extra `otel` is not installed.
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return replace(server, otlp_endpoint=None)
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip()
    if server.otlp_endpoint is not None:
        source, url = "otlp_endpoint", _with_path(server.otlp_endpoint)
    elif exporter == "none":
        return server
    elif environment.get(TRACES_VARIABLE):
        source, url = TRACES_VARIABLE, environment[TRACES_VARIABLE]
    elif environment.get(BASE_VARIABLE):
        source, url = BASE_VARIABLE, environment[BASE_VARIABLE].rstrip("/") + PATH
    else:
        return server
    _check(source, url, exporter, environment)
    return replace(server, otlp_endpoint=url)


def _with_path(url: str) -> str:
    stripped = url.rstrip("/")
    return stripped if stripped.endswith(PATH) else stripped + PATH


def _check(source: str, url: str, exporter: str, environment: Mapping[str, str]) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"{source}: {url[:200]!r} is not a URL (expected http://host:port)")
    if exporter not in ("", "otlp", "none"):
        raise ConfigError(f"OTEL_TRACES_EXPORTER: {exporter[:40]!r} is not supported (expected otlp or none)")
    asked = next((environment[name] for name in PROTOCOL_VARIABLES if environment.get(name)), PROTOCOL)
    if asked != PROTOCOL:
        raise ConfigError(f"{PROTOCOL_VARIABLES[1]}: {asked[:40]!r} is not supported (expected {PROTOCOL})")
    if not _installed():
        why = "without them, unset it or set OTEL_SDK_DISABLED=true" if source != "otlp_endpoint" else "or do without"
        raise ConfigError(f"{source}: traces require an extra: {install_command('otel')} ({why})")


def _installed() -> bool:
    try:
        return (
            find_spec("opentelemetry.sdk") is not None
            and find_spec("opentelemetry.exporter.otlp.proto.http") is not None
        )
    except ModuleNotFoundError:  # a parent package is missing
        return False
