"""The process of an engine that takes connections of other hosts, besides those of its own host."""

import sys

from roseinfer.cluster.remote.handoff import PeerConnections


def main() -> int:
    from roseinfer.engine import process

    return process.main(PeerConnections.from_boot)


if __name__ == "__main__":
    sys.exit(main())
