"""KV managers of tests."""

from typing import Any

from roseinfer.core.runner import KvSizes
from roseinfer.kv.events import KvEvents
from roseinfer.kv.manager import KvManager


def kv_manager(
    num_blocks: int, block_size: int, *, step_tokens: int = 0, events: KvEvents | None = None, **sizes: Any
) -> KvManager:
    """Make a KV manager. sizes: further ones of `KvSizes`."""
    return KvManager(KvSizes(num_blocks=num_blocks, block_size=block_size, **sizes), step_tokens, events)
