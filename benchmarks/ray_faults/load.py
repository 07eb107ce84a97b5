"""Seeded streams of openai's client with its default retries, and probes of `/ready`, while a part is killed."""

import asyncio
import http.client
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAIError

PROBE_INTERVAL_S, PROBE_TIMEOUT_S = 0.05, 2.0
# Ways in which a probe ends without a status.
REFUSED, RESET, TIMEOUT = "refused", "reset", "timeout"


@dataclass(frozen=True, slots=True)
class Load:
    """Streams of `tokens` tokens each, begun at random times; `limit_s`: when waiting ends after the first stream."""

    streams: int = 64
    tokens: int = 200
    rate: float = 16.0
    seed: int = 0
    limit_s: float = 150.0

    def arrivals_s(self) -> list[float]:
        """Return the same times for the same seed. A longer load begins like a shorter one."""
        draw, at_s, found = random.Random(self.seed), 0.0, []
        for _ in range(self.streams):
            at_s += draw.expovariate(self.rate)
            found.append(at_s)
        return found

    def prompt(self, stream: int) -> list[int]:
        draw = random.Random(self.seed * 1000 + stream)
        return [draw.randrange(10, 500) for _ in range(50)]


@dataclass(slots=True)
class Stream:
    """Stream as its client saw it. `first_s`: from the first attempt to the first token.

    `error`: "" if the stream has ended well, None while it runs.
    """

    text: str = ""
    first_s: float | None = None
    longest_gap_s: float = 0.0
    error: str | None = None


@dataclass(slots=True)
class Seen:
    """Load as its clients saw it. `statuses`: of all answers to the client, also of attempts that it has repeated.

    `probes`: time and end of each probe.
    """

    streams: list[Stream]
    statuses: Counter[int] = field(default_factory=Counter)
    probes: list[tuple[float, int | str]] = field(default_factory=list)

    def finished(self) -> list[Stream]:
        return [stream for stream in self.streams if stream.error == ""]

    def cut(self) -> list[Stream]:
        return [stream for stream in self.streams if stream.error and stream.first_s is not None]

    def failed(self) -> list[Stream]:
        """Return the requests that have failed before the first token."""
        return [stream for stream in self.streams if stream.error and stream.first_s is None]

    def waiting(self) -> list[Stream]:
        return [stream for stream in self.streams if stream.error is None]

    def answers(self, status: int) -> int:
        """Count the answers to clients and probes with this status."""
        return self.statuses[status] + sum(end == status for _, end in self.probes)

    def refused_s(self) -> float:
        """Return the seconds in which connections were refused."""
        later = self.probes[1:]
        return sum(
            after_s - at_s for (at_s, end), (after_s, _) in zip(self.probes, later, strict=False) if end == REFUSED
        )


def send(url: str, load: Load, strike: Callable[[], None], at_s: float) -> Seen:
    """Send the streams and call `strike` in a thread `at_s` into the load. Return when both have ended."""
    seen = Seen([Stream() for _ in range(load.streams)])
    done = threading.Event()
    prober = threading.Thread(target=_probe_until, args=(url, seen.probes, done))
    prober.start()
    try:
        asyncio.run(_send_all(url, load, seen, strike, at_s))
    finally:
        done.set()
        prober.join()
    return seen


async def _send_all(url: str, load: Load, seen: Seen, strike: Callable[[], None], at_s: float) -> None:
    async def count(response: object) -> None:
        seen.statuses[getattr(response, "status_code")] += 1  # noqa: B009 - of the HTTP library that openai uses

    async def strike_later() -> None:
        await asyncio.sleep(at_s)
        await asyncio.to_thread(strike)

    http_client = DefaultAsyncHttpxClient(event_hooks={"response": [count]})
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http_client) as client:
        model = (await client.models.list()).data[0].id
        seen.statuses.clear()
        streams = [
            asyncio.create_task(_stream(client, model, load, number, arrival_s, seen.streams[number]))
            for number, arrival_s in enumerate(load.arrivals_s())
        ]
        striking = asyncio.create_task(strike_later())
        _, late = await asyncio.wait(streams, timeout=load.limit_s)
        for task in late:
            task.cancel()
        await asyncio.gather(striking, *streams, return_exceptions=True)
        if error := striking.exception():
            raise error


async def _stream(client: AsyncOpenAI, model: str, load: Load, number: int, at_s: float, seen: Stream) -> None:
    await asyncio.sleep(at_s)
    began_s = last_s = time.monotonic()
    reason = None
    try:
        stream = await client.completions.create(
            model=model,
            prompt=load.prompt(number),
            max_tokens=load.tokens,
            seed=number,
            temperature=1.0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            now_s = time.monotonic()
            if seen.first_s is None:
                seen.first_s = now_s - began_s
            else:
                seen.longest_gap_s = max(seen.longest_gap_s, now_s - last_s)
            last_s = now_s
            for choice in chunk.choices:
                seen.text += choice.text
                reason = choice.finish_reason or reason
        seen.error = "" if reason else "no finish reason"
    except OpenAIError as error:
        seen.error = f"{type(error).__name__}: {getattr(error, 'code', None) or error}"
    except asyncio.CancelledError:
        raise
    except Exception as error:  # of the HTTP library, in the middle of a stream
        seen.error = type(error).__name__


def _probe_until(url: str, probes: list[tuple[float, int | str]], done: threading.Event) -> None:
    while not done.is_set():
        at_s = time.monotonic()
        probes.append((at_s, _probe(url)))
        done.wait(max(0.0, at_s + PROBE_INTERVAL_S - time.monotonic()))


def _probe(url: str) -> int | str:
    """Ask for `/ready` on a new connection. Return its status, or how it failed."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/ready")
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except ConnectionRefusedError:
        return REFUSED
    except TimeoutError:
        return TIMEOUT
    except (OSError, http.client.HTTPException):
        return RESET
    finally:
        connection.close()
