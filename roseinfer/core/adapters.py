"""LoRA adapters: how requests name them, and how they reach the slots of a runner.

An adapter adds scale * B @ A to some weights of a model (Hu et al., 2021). It is known by the digest of its content, so
other weights under an old name are another adapter.
"""

from collections.abc import Iterable
from functools import lru_cache
from itertools import islice
from typing import NamedTuple, Protocol

MAX_NAME_CHARS = 256
MAX_CACHED_KEYS_COUNT = 1024  # engines publish the same keys with every step
_KEY_BYTES = 8


class Adapter(NamedTuple):
    """Adapter that a request may use.

    `digest`: SHA-256 of its config and tensors in hexadecimal. `path`: its folder. `rank`: the largest of its ranks.
    `num_bytes`: its size in host memory, over all ranks of an engine.
    """

    name: str
    digest: str
    path: str
    rank: int
    num_bytes: int


class AdapterLoad(NamedTuple):
    """Copy an adapter from host memory to a slot of the runner."""

    slot: int
    digest: str


class AdapterPool(NamedTuple):
    """Slots of a runner for adapters. `slot_bytes`: size of a slot over all ranks. `load_bytes_per_s`: rate of copies
    from host memory to slots, measured at the start.
    """

    num_slots: int
    max_rank: int
    slot_bytes: int
    load_bytes_per_s: float


class AdapterRead(NamedTuple):
    """Result of reading a folder into host memory, which took `seconds`.

    `error`: why it cannot be used; None if `adapter` is set.
    """

    name: str
    path: str
    seconds: float
    adapter: Adapter | None = None
    error: str | None = None


class AdapterFiles(Protocol):
    """Reader of adapters into host memory, where plans find them by digest. No call waits for a file."""

    def read(self, name: str, path: str) -> None:
        """Begin to read a folder, in the background."""
        ...

    def take_read(self) -> list[AdapterRead]:
        """Return what was read since the last call."""
        ...

    def forget(self, digest: str) -> None:
        """Free the host memory of an adapter. Plans that were submitted still load it."""
        ...


def adapter_name_problem(name: str) -> str | None:
    """Return why an adapter cannot have a name; None if it can. Names are shown in logs and terminals."""
    if name and len(name) <= MAX_NAME_CHARS and name.isprintable() and name == name.strip():
        return None
    form = f"1 to {MAX_NAME_CHARS} printable characters, without spaces at the ends"
    return f"invalid adapter name {name[:MAX_NAME_CHARS]!r} (expected {form})"


@lru_cache(MAX_CACHED_KEYS_COUNT)
def adapter_key(digest: str) -> int:
    """Return the start of a digest as a signed integer of 64 bits, which is enough to recognise it. 0 means none."""
    return int.from_bytes(bytes.fromhex(digest)[:_KEY_BYTES], "big", signed=True)


def adapter_keys(digests: Iterable[str], count: int) -> tuple[int, ...]:
    """Return the keys of the first `count` digests, and 0 for each that is missing."""
    keys = tuple(map(adapter_key, islice(digests, count)))
    return keys + (0,) * (count - len(keys))
