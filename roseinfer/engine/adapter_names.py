"""Names of LoRA adapters that clients and engines share.

Engines forget names when they restart, and a name may change while one of them is away. So each name has a version:
whoever learns of a newer one passes it on, and all end with the same names in whatever order messages arrive.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from roseinfer.core.adapters import Adapter, adapter_name_problem
from roseinfer.core.errors import InvalidRequestError

MAX_NAMES_COUNT = 100_000


class AdapterEntry(NamedTuple):
    """Adapter of a name since `version`; None = the name was dropped."""

    version: int
    adapter: Adapter | None

    def replaces(self, other: "AdapterEntry") -> bool:
        """Return True if this entry is newer. Of two with one version, all processes choose the same."""
        return (self.version, self.adapter or ()) > (other.version, other.adapter or ())


class AdapterNames:
    """Names that one process knows. `adapters`: the adapters that requests may name; it changes in place.

    `entries`: includes dropped names, so that an older message does not bring them back.
    """

    def __init__(self, adapters: Iterable[Adapter] = ()) -> None:
        self.entries: dict[str, AdapterEntry] = {}
        self.adapters: dict[str, Adapter] = {}
        self.merge({adapter.name: AdapterEntry(0, adapter) for adapter in adapters})

    def merge(self, entries: Mapping[str, AdapterEntry]) -> dict[str, AdapterEntry]:
        """Take over newer entries, and return them."""
        newer = self.newer(entries)
        for name, entry in newer.items():
            self.entries[name] = entry
            if entry.adapter is None:
                self.adapters.pop(name, None)
            else:
                self.adapters[name] = entry.adapter
        return newer

    def newer(self, entries: Mapping[str, AdapterEntry]) -> dict[str, AdapterEntry]:
        """Return those of `entries` that are newer than ours."""
        ours = self.entries
        return {name: entry for name, entry in entries.items() if name not in ours or entry.replaces(ours[name])}

    def find(self, name: str) -> Adapter:
        """Return the adapter of a name. Raise `InvalidRequestError` for an unknown one."""
        if name not in self.adapters:
            raise InvalidRequestError(f"no LoRA adapter is named {name!r}", "name", "adapter_not_found")
        return self.adapters[name]

    def set(self, name: str, adapter: Adapter | None) -> dict[str, AdapterEntry]:
        """Give a name to an adapter, or drop it. Return the new entry by its name; nothing if it is no news.

        Raise `InvalidRequestError` if there are too many names.
        """
        before = self.entries.get(name)
        if before is not None and before.adapter == adapter:
            return {}
        if before is None and len(self.entries) >= MAX_NAMES_COUNT:
            raise InvalidRequestError(f"{MAX_NAMES_COUNT} names of adapters have been used, no more can be", "name")
        entries = {name: AdapterEntry(1 if before is None else before.version + 1, adapter)}
        self.merge(entries)
        return entries


def check_adapter_name(name: str) -> None:
    """Raise `InvalidRequestError` for a name that cannot be shown or is too long."""
    problem = adapter_name_problem(name)
    if problem is not None:
        raise InvalidRequestError(problem, "name")
