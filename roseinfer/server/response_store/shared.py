"""Store of all API processes of a server. Each of them finds and ends what another runs or has not written yet."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import orjson

from roseinfer.server.response_store.records import Key, StoredResponse
from roseinfer.server.response_store.store import SqliteStore

_TOPIC = "responses"
_GET, _CANCEL, _DROP = "get", "cancel", "drop"


class PeerProcesses(Protocol):
    """Other API processes of the server. A handler returns b"" if it has no answer."""

    def on(self, topic: str, handler: Callable[[bytes], bytes]) -> None: ...

    async def ask(self, topic: str, body: bytes) -> list[bytes]: ...


class RunningResponse:
    """Response that this process runs, whether or not its client waits."""

    def __init__(self, store: SqliteStore, record: StoredResponse, on_end: Callable[[], None]) -> None:
        self._store = store
        self._record = record
        self._on_end = on_end
        self._interrupt: Callable[[], None] | None = None
        self._ended = False
        store.put(record)

    @property
    def key(self) -> Key:
        return self._record.key

    @property
    def record(self) -> StoredResponse:
        """Current state, whether or not it could be stored."""
        return self._record

    def on_cancel(self, interrupt: Callable[[], None]) -> None:
        """Call `interrupt` when a client cancels or deletes the response, at once if that has happened."""
        self._interrupt = interrupt
        if self._ended:
            self._stop()

    def keep(self, response: dict[str, Any]) -> None:
        """Store a new state. Ignored after a final one."""
        if self._ended:
            return
        self._record = replace(self._record, response=response)
        if not self._record.running:
            self._record = replace(self._record, process="")
            self._end()
        self._store.put(self._record)

    def fail(self, error: Mapping[str, Any]) -> None:
        """End it with `error`: at least its "code", "message", and "retryable"."""
        self.keep(self._record.response | {"status": "failed", "error": dict(error)})

    def fail_with_server(self, message: str) -> None:
        """End it because the server ends, so the request may be sent again."""
        self.fail({"code": "server_error", "message": message, "retryable": True})

    def cancel(self) -> StoredResponse:
        """Stop the run. Return the final state."""
        self.keep(self._record.response | {"status": "cancelled"})
        self._stop()
        return self._record

    def drop(self) -> None:
        """Stop the run, and store no more states."""
        if not self._ended:
            self._end()
        self._stop()

    def _end(self) -> None:
        self._ended = True
        self._on_end()

    def _stop(self) -> None:
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            interrupt()


class SharedResponses:
    """Shared store as one API process uses it; `peers` are the others."""

    def __init__(self, store: SqliteStore, peers: PeerProcesses) -> None:
        self.store = store
        self._peers = peers
        self._running: dict[Key, RunningResponse] = {}
        peers.on(_TOPIC, self._answer)

    def begin(self, record: StoredResponse) -> RunningResponse:
        """Store a response that this process is about to run."""
        earlier = self._running.pop(record.key, None)
        if earlier is not None:  # a client has used an id again
            earlier.drop()
        record = replace(record, process=self.store.process)

        def forget() -> None:
            if self._running.get(running.key) is running:
                del self._running[running.key]

        running = RunningResponse(self.store, record, forget)
        self._running[record.key] = running
        return running

    async def find(self, key: Key) -> StoredResponse | None:
        """Return a response of any process. Raises `StoreFailedError`, like the methods below."""
        running = self._running.get(key)
        if running is not None:
            return running.record
        found = await self.store.get(key)
        if found is None or found.running:  # its process may have a newer state
            # A process that has written the end since the first look does not know it any more.
            found = await self._ask(_GET, key) or await self.store.get(key)
        return found

    async def delete(self, key: Key) -> bool:
        """Stop and delete a response. Return whether there was one."""
        if await self.find(key) is None:
            return False
        self._drop(key)
        await self._ask(_DROP, key)  # a process that runs it or has not written it yet would store it again
        await self.store.delete(key)
        return True

    async def cancel(self, key: Key) -> StoredResponse | None:
        """Stop a response if it runs. Return its state, None if it is unknown."""
        running = self._running.get(key)
        if running is not None:
            return running.cancel()
        found = await self.find(key)
        if found is None or not found.running:
            return found
        return await self._ask(_CANCEL, key) or await self.find(key)

    # --- between processes --------------------------------------------------------------------------------------
    async def _ask(self, action: str, key: Key) -> StoredResponse | None:
        answers = await self._peers.ask(_TOPIC, orjson.dumps([action, *key]))
        return next((StoredResponse(*orjson.loads(answer)) for answer in answers if answer), None)

    def _answer(self, body: bytes) -> bytes:
        action, *names = orjson.loads(body)
        key = Key(*names)
        if action == _DROP:
            self._drop(key)
            if self.store.pending(key) is not None:
                self.store.delete_later(key)
            return b""
        running = self._running.get(key)
        if running is not None:
            record: StoredResponse | None = running.cancel() if action == _CANCEL else running.record
        else:
            record = self.store.pending(key)
        if record is None:
            return b""
        return orjson.dumps([record.owner, record.id, record.response, record.input(), record.process, record.size])

    def _drop(self, key: Key) -> None:
        running = self._running.get(key)
        if running is not None:
            running.drop()
