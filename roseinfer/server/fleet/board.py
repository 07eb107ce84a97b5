"""Numbers that every worker writes of itself and everybody reads: limits hold for the server as a whole."""

import mmap
import os
from enum import IntEnum

from roseinfer.engine.client import Inflight
from roseinfer.server.request.lifecycle import Room

_CELL_BYTES = 8


class Cell(IntEnum):
    REQUESTS = 0
    PROMPTS = 1
    INFLIGHT = 2
    CLOSED = 3  # connections that have ended, ever


class Board:
    """A row of 64-bit counts for each worker, in memory that its processes share.

    Nobody waits for anybody: each worker writes its own row only, and an aligned count is read and written whole. Two
    workers that look at the same moment may both take the last place below a limit, so it can be passed by as many
    as there are workers, less one.
    """

    def __init__(self, descriptor: int, workers: int) -> None:
        self._memory = mmap.mmap(descriptor, workers * len(Cell) * _CELL_BYTES)
        self._cells = memoryview(self._memory).cast("q")
        self._columns = [self._cells[cell :: len(Cell)] for cell in Cell]

    def get(self, worker: int, cell: Cell) -> int:
        return self._cells[worker * len(Cell) + cell]

    def add(self, worker: int, cell: Cell, amount: int) -> None:
        self._cells[worker * len(Cell) + cell] += amount

    def set(self, worker: int, cell: Cell, value: int) -> None:
        self._cells[worker * len(Cell) + cell] = value

    def clear(self, worker: int) -> None:
        """Of a worker that is gone."""
        for cell in Cell:
            self.set(worker, cell, 0)

    def total(self, cell: Cell) -> int:
        return sum(self._columns[cell])


def board_file(path: str, workers: int) -> int:
    """The descriptor of a new board, all zero. The file needs no name once everybody has the descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.ftruncate(descriptor, workers * len(Cell) * _CELL_BYTES)
    os.unlink(path)
    return descriptor


class SharedRoom(Room):
    """What requests take up in all workers."""

    def __init__(self, board: Board, worker: int) -> None:
        super().__init__()
        self._board = board
        self._worker = worker

    def take(self, requests: int, prompts: int) -> None:
        super().take(requests, prompts)
        self._board.set(self._worker, Cell.REQUESTS, self.requests)
        self._board.set(self._worker, Cell.PROMPTS, self.prompts)

    def all_requests(self) -> int:
        return self._board.total(Cell.REQUESTS)

    def all_prompts(self) -> int:
        return self._board.total(Cell.PROMPTS)


class SharedInflight(Inflight):
    """The limit on requests in the engine, over all workers."""

    def __init__(self, limit: int | None, board: Board, worker: int) -> None:
        super().__init__(limit)
        self._board = board
        self._worker = worker

    def note(self, own: int) -> None:
        super().note(own)
        self._board.set(self._worker, Cell.INFLIGHT, own)

    def total(self) -> int:
        return self._board.total(Cell.INFLIGHT)
