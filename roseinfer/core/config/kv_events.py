"""Options of KV events: where an engine publishes which KV blocks it holds."""

from dataclasses import dataclass, fields, replace
from ipaddress import ip_address

from roseinfer.core.config.option import check_positive, option
from roseinfer.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsConfig:
    """Options of KV events. `rank`: number of the engine, added to its ports. `served_name`: model name that requests
    use, if it differs from the model's own.
    """

    kv_events_endpoint: str | None = option(
        None, "publish stored and removed KV blocks by ZeroMQ; engine N at PORT + N", metavar="tcp://ADDRESS:PORT"
    )
    kv_events_topic: str | None = option(
        None, "topic of the KV events; default: kv@ADDRESS:PORT@NAME, from endpoint and model", metavar="TOPIC"
    )
    kv_events_replay_endpoint: str | None = option(
        None, "answer requests for missed KV events here; engine N at PORT + N", metavar="tcp://ADDRESS:PORT"
    )
    kv_events_buffer_steps: int = option(10000, "number of steps whose KV events can be replayed")
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
        """Return the endpoint of engine `rank`."""
        return _zmq_address("kv_events_endpoint", self.kv_events_endpoint, self.rank)

    @property
    def replay_endpoint(self) -> str | None:
        """Return the replay endpoint of engine `rank`."""
        return _zmq_address("kv_events_replay_endpoint", self.kv_events_replay_endpoint, self.rank)

    def topic(self, model: str) -> str:
        """Return the topic of engine `rank`, whose model is `model`."""
        assert self.endpoint is not None, "KV events are off"
        if self.kv_events_topic is not None:
            return self.kv_events_topic
        return f"kv@{self.endpoint.removeprefix('tcp://')}@{self.served_name or model}"

    def for_engine(self, engine: int, engines: int) -> "KvEventsConfig":
        """Return the config of engine number `engine`. Raise `ConfigError` if ports of the engines overlap."""
        ports = [_zmq_port(each) for each in (self.kv_events_endpoint, self.kv_events_replay_endpoint) if each]
        if len(ports) == 2 and abs(ports[0] - ports[1]) < engines:
            raise ConfigError(f"kv_events_replay_endpoint: {engines} engines need {engines} ports from each endpoint")
        return replace(self, rank=engine)


def _zmq_address(name: str, endpoint: str | None, rank: int) -> str | None:
    """Return an endpoint with `rank` added to its port. Raise `ConfigError` unless it can be bound."""
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
