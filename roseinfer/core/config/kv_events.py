"""The options of KV events: where an engine publishes which KV blocks it holds."""

from dataclasses import dataclass, fields, replace
from ipaddress import ip_address

from roseinfer.core.config.option import check_positive, option
from roseinfer.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsConfig:
    """Who is told which KV blocks an engine holds. `rank`: the number of the engine, which is added to its ports;
    `served_name`: what requests call its model, if not by its own name.
    """

    kv_events_endpoint: str | None = option(
        None, "publish by ZeroMQ which KV blocks the engine holds; engine N at PORT + N", metavar="tcp://ADDRESS:PORT"
    )
    kv_events_topic: str | None = option(
        None, "topic of the KV events; default: kv@ADDRESS:PORT@NAME, of endpoint and model", metavar="TOPIC"
    )
    kv_events_replay_endpoint: str | None = option(
        None, "where KV events that were missed can be asked for; engine N at PORT + N", metavar="tcp://ADDRESS:PORT"
    )
    kv_events_buffer_steps: int = option(10000, "steps whose KV events can be asked for")
    rank: int = 0
    served_name: str | None = None

    def __post_init__(self) -> None:
        check_positive(self, "kv_events_buffer_steps")
        for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
            _zmq_address(name, getattr(self, name), self.rank)
        given = next((f.name for f in fields(self) if f.metadata and getattr(self, f.name) != f.default), None)
        if given is not None and self.kv_events_endpoint is None:
            raise ConfigError(f"{given} needs kv_events_endpoint")

    @property
    def endpoint(self) -> str | None:
        """Of the engine `rank`."""
        return _zmq_address("kv_events_endpoint", self.kv_events_endpoint, self.rank)

    @property
    def replay_endpoint(self) -> str | None:
        """Of the engine `rank`."""
        return _zmq_address("kv_events_replay_endpoint", self.kv_events_replay_endpoint, self.rank)

    def topic(self, model: str) -> str:
        """Of the engine `rank`. `model`: its own name."""
        assert self.endpoint is not None, "nobody asked for KV events"
        if self.kv_events_topic is not None:
            return self.kv_events_topic
        return f"kv@{self.endpoint.removeprefix('tcp://')}@{self.served_name or model}"

    def for_engine(self, engine: int, engines: int) -> "KvEventsConfig":
        """Of the engine of this number. Raises `ConfigError` if ports of `engines` engines are the same."""
        ports = [_zmq_port(each) for each in (self.kv_events_endpoint, self.kv_events_replay_endpoint) if each]
        if len(ports) == 2 and abs(ports[0] - ports[1]) < engines:
            raise ConfigError(f"kv_events_replay_endpoint: {engines} engines take {engines} ports from each endpoint")
        return replace(self, rank=engine)


def _zmq_address(name: str, endpoint: str | None, rank: int) -> str | None:
    """An endpoint with its port moved by `rank`. Raises `ConfigError` unless it is one that can be bound."""
    if endpoint is None:
        return None
    head, _, port = endpoint.rpartition(":")
    host = head.removeprefix("tcp://")
    try:
        ip_address(host[1:-1] if host.startswith("[") and host.endswith("]") else host)
        fits = head != host and port.isascii() and port.isdigit() and int(port) > 0 and int(port) + rank < 2**16
    except ValueError:
        fits = False
    if not fits:
        raise ConfigError(f"{name} must be tcp://ADDRESS:PORT with an IP address of this host, got {endpoint!r}")
    return f"{head}:{int(port) + rank}"


def _zmq_port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])
