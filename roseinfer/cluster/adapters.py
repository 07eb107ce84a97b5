"""LoRA adapters of several engines: one set of names, which engines that join or restart get too."""

import asyncio
from collections.abc import Mapping

from roseinfer.cluster.endpoints import Endpoints, unavailable_error
from roseinfer.core.adapters import Adapter
from roseinfer.core.errors import InvalidRequestError, RoseinferError, TooManyReadsError
from roseinfer.engine.adapter_client import AdapterClient
from roseinfer.engine.adapter_names import AdapterEntry, AdapterNames, check_adapter_name


class FleetAdapters:
    """Adapters that all engines of `endpoints` serve. `names`: those that this process knows."""

    def __init__(self, endpoints: Endpoints) -> None:
        self.names = AdapterNames()
        self._endpoints = endpoints

    async def put(self, name: str, path: str) -> Adapter:
        """Let all engines load an adapter, then give it its name.

        An engine that is lost meanwhile gets the name when it is back. Raise the errors of `Engine.put_adapter`; no
        name has changed then.
        """
        check_adapter_name(name)
        engines = {each.number: each.engine for each in self._endpoints if each.engine is not None}
        reads = [engine.read_adapter(name, path) for engine in engines.values()]
        results = dict(zip(engines, await asyncio.gather(*reads, return_exceptions=True), strict=True))
        adapter = self._agreed(results)
        await self._set(name, adapter)
        return adapter

    async def drop(self, name: str) -> Adapter:
        """Drop a name everywhere. Raise `InvalidRequestError` for an unknown one."""
        adapter = self.names.find(name)
        await self._set(name, None)
        return adapter

    async def _set(self, name: str, adapter: Adapter | None) -> None:
        entries = self.names.set(name, adapter)
        clients = self._clients()
        for client in clients:
            client.send(entries)
        await asyncio.gather(*(client.settled(entries) for client in clients))

    def _agreed(self, results: dict[int, Adapter | BaseException]) -> Adapter:
        """Return the adapter that all engines have read. Raise an error that names an engine which has not."""
        found: dict[int, Adapter] = {}
        for number, result in results.items():
            if isinstance(result, Adapter):
                found[number] = result
            elif isinstance(result, InvalidRequestError):
                raise InvalidRequestError(self._of(number, result.message), result.param, result.code)
            elif isinstance(result, TooManyReadsError) or not isinstance(result, RoseinferError):
                raise result
        if not found:
            raise unavailable_error(self._endpoints)
        first, *others = found
        for number in others:
            if found[number].digest != found[first].digest:
                message = f"other content at path {found[number].path!r} than engine {first}"
                raise InvalidRequestError(self._of(number, message), "path", "adapter_not_loaded")
        return found[first]

    def _of(self, number: int, message: str) -> str:
        return message if len(self._endpoints) == 1 else f"engine {number}: {message}"

    def join(self, client: AdapterClient) -> None:
        """Share the names with an engine that has been connected."""
        self.spread(client.names.entries)
        client.send(self.names.entries)

    def spread(self, entries: Mapping[str, AdapterEntry]) -> None:
        """Pass entries that an engine knows on to the others, if they are newer."""
        newer = self.names.merge(entries)
        for client in self._clients():
            client.send(newer)

    def _clients(self) -> list[AdapterClient]:
        return [each.engine.adapter_client for each in self._endpoints if each.engine is not None]
