"""Phases of a start, which are reported and timed."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from roseinfer.core.progress import stage

# Names of the phases for users.
_SHOWN = {
    "load": "loading the model",
    "cache": "sizing the KV cache",
    "warm-up": "warming up",
    "graphs": "capturing CUDA graphs",
}


@contextmanager
def phase(startup_s: dict[str, float], name: str) -> Iterator[None]:
    """Report the phase `name`, and note its seconds in `startup_s`."""
    began = perf_counter()
    with stage(_SHOWN[name]):
        yield
    startup_s[name] = perf_counter() - began
