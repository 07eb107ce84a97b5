"""Options of the HTTP server."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from roseinfer.core.config.option import check_address, check_choices, check_positive, check_within, option
from roseinfer.core.errors import ConfigError
from roseinfer.core.json_file import parse_json

# Value of `response_store` that disables it.
STORE_OFF = "off"
_HOST_NAME = re.compile(r"\*|(\*\.)?[A-Za-z0-9_]([A-Za-z0-9._-]*)")
# As browsers write it in `Origin`: pages of files have "null", or "file://" within apps.
_ORIGIN = re.compile(r"\*|null|file://|[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#*,]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of the HTTP server."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 = any free one")
    uds: str | None = option(None, "listen on this Unix socket instead of --host and --port", metavar="PATH")
    api_workers: int | None = option(None, "API processes; default: 1 to 4, by the number of cores")
    api_key: tuple[str, ...] = option(
        (), "key that requests must carry; repeatable", metavar="KEY", secret=True, spaced=True
    )
    api_key_file: str | None = option(None, "file with such keys, one per line", metavar="FILE")
    ssl_certfile: str | None = option(None, "serve HTTPS with this certificate (PEM, with its chain)", metavar="FILE")
    ssl_keyfile: str | None = option(None, "key of --ssl-certfile; default: in the same file", metavar="FILE")
    ssl_ca_certs: str | None = option(None, "certificates of CAs that sign certificates of clients", metavar="FILE")
    ssl_cert_reqs: int = option(
        0, "certificates of clients: 0 = not asked for, 1 = checked if there is one, 2 = required"
    )
    ssl_ciphers: str | None = option(None, "ciphers of TLS 1.2, as OpenSSL writes them", metavar="TEXT")
    root_path: str = option("", "path under which a reverse proxy shows the server, for example /llm", metavar="PATH")
    served_model_name: tuple[str, ...] = option(
        (),
        "names to serve the model under, or one name for each of several models; default: MODEL",
        metavar="NAME",
        spaced=True,
    )
    chat_template: str | None = option(
        None, "chat template instead of the model's: a file, or the template itself", metavar="FILE|TEMPLATE"
    )
    default_chat_template_kwargs: str | None = option(
        None,
        "variables of the chat template for chats that do not set them, for example '{\"enable_thinking\": false}'",
        metavar="JSON",
    )
    tool_call_parser: str | None = option(
        None, "format of the model's tool calls, 'none' = no tool calls; default: by its chat template", metavar="NAME"
    )
    reasoning: bool = option(True, "separate thinking from the answer, if the chat template marks it")
    slo_classes: str | None = option(
        None, "named classes of latency objectives, and the defaults of clients", metavar="FILE"
    )
    length_predictor: str | None = option(
        None, "predict output lengths with this file of `roseinfer train-predictor`", metavar="FILE"
    )
    allowed_origins: tuple[str, ...] = option(
        (), "origin of web pages that may use the server, '*' = any; repeatable", metavar="ORIGIN"
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "host name under which a server without a key may be reached, besides localhost and IP addresses; '*' = any, "
        "'*.DOMAIN' = any subdomain; repeatable",
        metavar="NAME",
    )
    enable_force_include_usage: bool = option(False, "end every stream with the usage, as if all requests asked for it")
    max_num_queued_reqs: int = option(1024, "prompts in the server, running ones included; more get a 503")
    max_body_bytes: int = option(8 * 2**20, "largest request body; larger ones get a 413")
    max_prompts: int = option(1024, "prompts of one completion, or inputs of one embedding request")
    max_choices: int = option(128, "largest n")
    max_logprobs: int = option(20, "largest logprobs and top_logprobs; -1 = no limit")
    max_stop_strings: int = option(64, "stop strings of one request")
    max_body_readers: int = option(256, "request bodies that a process reads at once; more get a 503")
    body_timeout: float = option(60.0, "seconds within which a request's body must arrive")
    write_timeout: float = option(30.0, "seconds after which a client that reads nothing is disconnected")
    sse_keep_alive_interval: float = option(15.0, "seconds between comments on an idle stream; 0 = none")
    shutdown_timeout: float = option(30.0, "seconds that running requests may take to finish after SIGTERM")
    stall_timeout: float = option(60.0, "seconds without an engine heartbeat after which /health returns 503")
    worker_timeout: float = option(30.0, "seconds without a heartbeat after which an API worker is killed and replaced")
    response_store: str | None = option(
        None, "file that keeps responses; default: a temporary one; 'off' = keep none", metavar="PATH"
    )
    response_store_max_count: int = option(10_000, "maximum number of stored responses; the oldest are removed first")
    response_store_max_bytes: int = option(256 * 2**20, "maximum bytes of all stored responses, input included")
    response_store_max_days: float = option(30.0, "days after which a response is removed")
    enable_log_requests: bool = option(False, "log the start of each request too")
    otlp_endpoint: str | None = option(
        None, "send traces to this collector, for example http://127.0.0.1:4318 (OTLP over HTTP)", metavar="URL"
    )
    enable_docs: bool = option(True, "serve /docs and /openapi.json")
    console: bool = option(True, "serve the browser console at /")
    log_level: str = option("info", "how much to log", choices=("debug", "info", "warning", "error"))
    log_format: str = option("text", "how to write log lines: for people, or as JSON", choices=("text", "json"))

    @property
    def stores_responses(self) -> bool:
        return self.response_store != STORE_OFF

    @property
    def template_variables(self) -> dict[str, Any]:
        """Return `default_chat_template_kwargs` by name. Raise `ConfigError` for anything but a JSON object."""
        if self.default_chat_template_kwargs is None:
            return {}
        try:
            found = parse_json(self.default_chat_template_kwargs)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"default_chat_template_kwargs: invalid JSON: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError("default_chat_template_kwargs must be a JSON object")
        return found

    def __post_init__(self) -> None:
        check_choices(self)
        _ = self.template_variables
        check_positive(self, "max_num_queued_reqs", "max_body_bytes", "max_prompts", "max_choices", "stall_timeout")
        check_positive(self, "api_workers", "worker_timeout", "max_body_readers", "body_timeout", "write_timeout")
        check_positive(self, "response_store_max_count", "response_store_max_bytes", "response_store_max_days")
        for name in ("shutdown_timeout", "sse_keep_alive_interval", "max_stop_strings"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.max_logprobs < -1:
            raise ConfigError(f"max_logprobs must be -1 (no limit) or more, got {self.max_logprobs}")
        check_address(self, "host")
        check_within(self, 0, 65535, "port")
        if self.uds is not None:
            self._check_uds(self.uds)
        check_api_keys(self.api_key, "api_key")
        self._check_tls()
        if self.root_path and not (self.root_path.startswith("/") and self.root_path.strip("/")):
            raise ConfigError(f"root_path must begin with / and name a path, got {self.root_path!r}")
        if self.response_store == "":
            raise ConfigError("response_store must be a path or 'off', got ''")
        for name in self.allowed_hosts:
            if not _HOST_NAME.fullmatch(name):
                raise ConfigError(
                    f"allowed_hosts: invalid host name {name!r} (expected a name without scheme and port)"
                )
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                expected = "'*', 'null' or scheme://host:port without a path"
                raise ConfigError(f"allowed_origins: invalid origin {origin!r} (expected {expected})")
        if not all(name.strip() for name in self.served_model_name):
            raise ConfigError("served_model_name: a name must not be empty")

    def _check_uds(self, path: str) -> None:
        if not path:
            raise ConfigError("uds must be a path, got ''")
        for field in fields(self):
            if field.name in ("host", "port") and getattr(self, field.name) != field.default:
                raise ConfigError(f"--uds cannot be combined with --{field.name}: the server listens on one address")

    def _check_tls(self) -> None:
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_ciphers"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                raise ConfigError(f"{name} needs ssl_certfile")
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ConfigError(f"ssl_cert_reqs must be 0, 1 or 2, got {self.ssl_cert_reqs}")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError("ssl_cert_reqs needs ssl_ca_certs, which sign the certificates of clients")


def check_api_keys(keys: Iterable[str], source: str) -> None:
    """Raise `ConfigError` naming `source`, but no key, if a key is empty or not valid in a header."""
    for key in keys:
        if not key.strip():
            raise ConfigError(f"{source}: a key must not be empty")
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(f"{source}: a key must consist of visible ASCII characters")
