"""A reader of the console's feed."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.server.live import PATIENCE_S

Events = Iterator[tuple[str, Any]]


@contextmanager
def looking(url: str) -> Iterator[Events]:
    """Names and data of a feed's events, on a connection of its own."""
    # Loading the certificates is most of the cost of a client.
    with (
        httpx.Client(base_url=url, timeout=PATIENCE_S, verify=False) as client,
        client.stream("GET", "/console/events") as answer,
    ):
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield _read(answer)


def _read(answer: httpx.Response) -> Events:
    name = ""
    for line in answer.iter_lines():
        kind, _, value = line.partition(": ")
        if kind == "event":
            name = value
        elif kind == "data":
            yield name, json.loads(value)


def ticks(events: Events) -> Iterator[dict[str, Any]]:
    return (data for name, data in events if name == "tick")
