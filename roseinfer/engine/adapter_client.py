"""Client-side part of LoRA adapters: the names that one engine knows, and its reads in progress."""

import asyncio
import itertools
from collections.abc import Iterable, Mapping

from roseinfer.core.adapters import Adapter
from roseinfer.core.errors import InvalidRequestError, RoseinferError, TooManyReadsError
from roseinfer.engine.adapter_names import AdapterEntry, AdapterNames
from roseinfer.engine.messages import AdapterAnswer, AdapterUpdate, ReadAdapter
from roseinfer.engine.transport import Transport


class AdapterClient:
    """Adapters of one engine. `names`: as of its last message, and what was sent to it since."""

    def __init__(self, transport: Transport) -> None:
        self.names = AdapterNames()
        self._received = AdapterNames()
        self._changed = asyncio.Event()
        self._gone = False
        self._transport = transport
        self._numbers = itertools.count()
        self._reads: dict[int, asyncio.Future[Adapter]] = {}

    def start(self, adapters: Iterable[Adapter]) -> None:
        """Take over the adapters that the engine has had from its start."""
        self.take_names(AdapterNames(adapters).entries)

    def take_names(self, entries: Mapping[str, AdapterEntry]) -> None:
        """Take over what the engine sends to all of its clients."""
        self._received.merge(entries)
        self.names.merge(entries)
        self._changed.set()

    async def settled(self, entries: Mapping[str, AdapterEntry]) -> None:
        """Return once the engine has passed these entries on to all of its clients, or is gone.

        A client that then asks another process for an adapter finds its name there.
        """
        while not self._gone and self._received.newer(entries):
            self._changed.clear()
            await self._changed.wait()

    async def read(self, name: str, path: str) -> Adapter:
        """Let the engine load an adapter that is to get a name.

        Raise `InvalidRequestError` if it refuses, `TooManyReadsError` if it reads too many, or the error of `fail`.
        """
        number = next(self._numbers)
        answer = self._reads[number] = asyncio.get_running_loop().create_future()
        try:
            self._transport.send(ReadAdapter(number, name, path))
            return await answer
        finally:
            del self._reads[number]

    async def set(self, name: str, adapter: Adapter | None) -> None:
        """Give a name to an adapter, or drop it, for all clients. Raise `InvalidRequestError` if there are too many."""
        entries = self.names.set(name, adapter)
        if entries:
            self._transport.send(AdapterUpdate(entries))
        await self.settled(entries)

    def send(self, entries: Mapping[str, AdapterEntry]) -> None:
        """Send the engine those entries that are news to it."""
        newer = self.names.merge(entries)
        if newer:
            self._transport.send(AdapterUpdate(newer))

    def take_answer(self, message: AdapterAnswer) -> None:
        """End the read that the engine has answered."""
        answer = self._reads.get(message.number)
        if answer is None or answer.done():
            return
        if message.adapter is not None:
            answer.set_result(message.adapter)
        elif message.busy:
            answer.set_exception(TooManyReadsError(message.error))
        else:
            answer.set_exception(InvalidRequestError(message.error or "unknown error", "path", "adapter_not_loaded"))

    def fail(self, error: RoseinferError) -> None:
        """End all reads with an error: the engine is gone."""
        self._gone = True
        self._changed.set()
        for answer in self._reads.values():
            if not answer.done():
                answer.set_exception(error)
