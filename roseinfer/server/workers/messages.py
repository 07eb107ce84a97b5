"""Messages between the manager and a worker. Connections travel on another socket: see `handover`."""

import msgspec

from roseinfer.cluster.addresses import EngineAddresses
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.config.server import ServerConfig
from roseinfer.processes.child import ErrorReport
from roseinfer.server.observe.exposition import Snapshot
from roseinfer.server.request.slo_classes import SloClasses


class WorkerModel(msgspec.Struct):
    """One of the models that a worker serves.

    `config`: the server's options, with this model's own. `first_engine`: number of its first engine. `record`: file
    for its router's decisions. `counters`: path of its shared rows.
    """

    config: ServerConfig
    replicas: ReplicasConfig
    model_name: str
    tokenizer: str
    engines: EngineAddresses
    first_engine: int
    record: str | None
    max_inflight: int | None
    counters: str


class WorkerBoot(msgspec.Struct):
    """Boot struct of a worker.

    `models`: the options of the server are those of the first. `index`: its place among `workers`; `number`: unique
    among all workers ever started. `response_file`: where all workers store responses, None: not at all. `control` and
    `connections`: descriptors of its sockets.
    """

    models: list[WorkerModel]
    slo_classes: SloClasses
    response_file: str | None
    index: int
    number: int
    workers: int
    control: int
    connections: int


class Serving(msgspec.Struct, tag="serving"):
    """The worker accepts connections from now on."""


class Up(msgspec.Struct, tag="up"):
    """The worker has an engine and takes requests. `chats`: its model has a chat template."""

    chats: bool = False


class WorkerFailed(msgspec.Struct, tag="failed"):
    """The worker cannot serve."""

    error: ErrorReport


class DrainWorker(msgspec.Struct, tag="drain"):
    """Take no more requests."""


class Idle(msgspec.Struct, tag="idle"):
    """No request is left, after a `DrainWorker`."""


class Stop(msgspec.Struct, tag="stop"):
    """End the requests that are left, then exit."""


class MetricsRequest(msgspec.Struct, tag="scrape"):
    """Request of a worker for the metrics of all. `own`: the worker's own."""

    number: int
    own: Snapshot


class MetricsReply(msgspec.Struct, tag="scraped"):
    """Reply to a `MetricsRequest`."""

    number: int
    all: Snapshot


class CollectMetrics(msgspec.Struct, tag="collect"):
    """Request for a worker's own metrics."""

    number: int


class CollectedMetrics(msgspec.Struct, tag="collected"):
    """Reply to a `CollectMetrics`."""

    number: int
    own: Snapshot


class PeerQuery(msgspec.Struct, tag="query"):
    """Query of a worker to all others and the manager, see `observe.peer_queries`."""

    number: int
    topic: str
    body: bytes


class PeerAnswers(msgspec.Struct, tag="answers"):
    """Reply to a `PeerQuery`, without those that know nothing."""

    number: int
    answers: list[bytes]


class ForwardedQuery(msgspec.Struct, tag="forwarded"):
    """Query of another worker."""

    number: int
    topic: str
    body: bytes


class QueryAnswer(msgspec.Struct, tag="answer"):
    """Reply to a `ForwardedQuery`. `body` None: nothing is known."""

    number: int
    body: bytes | None


FromWorker = Serving | Up | WorkerFailed | Idle | MetricsRequest | CollectedMetrics | PeerQuery | QueryAnswer
FromManager = DrainWorker | Stop | MetricsReply | CollectMetrics | PeerAnswers | ForwardedQuery
