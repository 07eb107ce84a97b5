"""A sink that is read at the reader's own pace."""

import asyncio
from collections.abc import AsyncIterator

from roseinfer.core.errors import RoseinferError
from roseinfer.engine.api import Route, SequenceChunk, Submission
from roseinfer.engine.output import merge


class ChunkBuffer:
    """Holds at most one unread chunk per sample, so that a slow reader never delays others.

    `samples`: how many have to end. What was not read when `fail` is called is lost.
    """

    def __init__(self, samples: int) -> None:
        self._open = samples
        self._unread: dict[int, SequenceChunk] = {}
        self._error: RoseinferError | None = None
        self._news = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self._open == 0 or self._error is not None

    def put(self, chunk: SequenceChunk) -> None:
        unread = self._unread.get(chunk.index)
        self._unread[chunk.index] = chunk if unread is None else merge(unread, chunk)
        if chunk.finish_reason is not None:
            self._open -= 1
        self._news.set()

    def fail(self, error: RoseinferError) -> None:
        self._error = error
        self._news.set()

    async def read(self) -> SequenceChunk:
        """Raises the error that the request failed with, and `StopAsyncIteration` after the last chunk."""
        while True:
            if self._error is not None:
                raise self._error
            if self._unread:
                index = next(iter(self._unread))
                return self._unread.pop(index)
            if self.ended:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()


class ChunkStream:
    """What `Engine.generate` returns."""

    def __init__(self, mailbox: ChunkBuffer, submission: Submission) -> None:
        self._mailbox = mailbox
        self._submission = submission

    @property
    def ended(self) -> bool:
        return self._mailbox.ended

    def __aiter__(self) -> AsyncIterator[SequenceChunk]:
        return self

    async def __anext__(self) -> SequenceChunk:
        return await self._mailbox.read()

    @property
    def route(self) -> Route | None:
        return self._submission.route

    def cancel(self) -> None:
        self._submission.cancel()
