"""Where the engines of a server are, as one of its processes tells another."""

import msgspec


class EngineAddresses(msgspec.Struct):
    """`addresses`: paths of sockets of this host, with the `Board` at `board`; or, where that is None, ports of hosts,
    which want the `secret`, or what has been written to `secret_file` since.

    `stall_s`: seconds without a sign of life after which the connection to an engine on another host is given up.
    """

    addresses: list[str]
    board: str | None = None
    secret: bytes = b""
    stall_s: float = 60.0
    secret_file: str = ""

    def __repr__(self) -> str:
        return f"EngineAddresses({self.addresses})"
