"""Addresses of the engines of a server."""

import msgspec


class EngineAddresses(msgspec.Struct):
    """Addresses of the engines of a server, as one of its processes sends them to another.

    `addresses`: paths of Unix sockets; `rows`: file of their `EngineRows`; `first`: number of the first engine. If
    `rows` is None: ports of other hosts, reached by TLS with the certificates in `tls_dir`. `stall_s`: seconds without
    a heartbeat after which the connection to such an engine is closed.
    """

    addresses: list[str]
    rows: str | None = None
    stall_s: float = 60.0
    tls_dir: str = ""
    first: int = 0
