"""Memory that the GPUs of a group write to each other, and its synchronisation.

Each rank has one buffer that all ranks may write. A rank pushes data to a place of its own in every other rank's
buffer, and each program of a kernel has its part of that place. Program i of one rank communicates only with program i
of the others. So kernels of any sizes may follow each other, if all ranks launch the same ones.

A program counts its calls, and everything that it pushes carries the count, so that nothing is ever reset. Two places
alternate: a rank that has the other ranks' data of this call knows that they have read its data of the previous call,
whose place the next call writes. Counts are in device memory, so graphs can replay the kernels.

Waiting is bounded. A program that waited too long records it in host memory, takes NaN for the missing data, so that it
is not taken for a result, and does not wait again.
"""

from dataclasses import dataclass

import torch

from roseinfer.kernels.common.triton_support import cdiv, tl, triton

TURN_COUNT = 2

# Words that carry their count (`push_words`): the payload is a 32-bit word, and a program takes at most so many.
MAX_PROGRAM_WORDS = 512
WORD_PROGRAMS = 128
# Bytes that a program takes at a time, followed by a flag (`push_blocks`).
BLOCK_PROGRAMS = 128
BLOCK_BYTES = 8192
_ALIGNMENT_BYTES = 16  # of where places begin


@dataclass(frozen=True, slots=True)
class PeerLayout:
    """Offsets in a rank's buffer, in bytes. limit: the most bytes that a rank pushes in one call. piece_bytes: the most
    of a piece that a copy engine brings (`pieces`); 0 = none does.

    Words [TURN_COUNT, size, WORD_PROGRAMS * MAX_PROGRAM_WORDS] int64; blocks [TURN_COUNT, size, BLOCK_PROGRAMS, region]
    bytes; flags [TURN_COUNT, size, BLOCK_PROGRAMS] int32; meetings [TURN_COUNT, size] int32; pieces [TURN_COUNT,
    piece_bytes] bytes.
    """

    size: int
    limit: int
    piece_bytes: int = 0

    @property
    def word_limit(self) -> int:
        """The most bytes that a rank pushes in words."""
        return min(self.limit, WORD_PROGRAMS * MAX_PROGRAM_WORDS * 4)

    @property
    def blocks(self) -> int:
        return TURN_COUNT * self.size * WORD_PROGRAMS * MAX_PROGRAM_WORDS * 8

    @property
    def region(self) -> int:
        """Bytes of a program's part of the blocks: whole blocks."""
        return cdiv(self.limit, BLOCK_PROGRAMS * BLOCK_BYTES) * BLOCK_BYTES

    @property
    def flags(self) -> int:
        return self.blocks + TURN_COUNT * self.size * BLOCK_PROGRAMS * self.region

    @property
    def meetings(self) -> int:
        return self.flags + TURN_COUNT * self.size * BLOCK_PROGRAMS * 4

    @property
    def pieces(self) -> int:
        return cdiv(self.meetings + TURN_COUNT * self.size * 4, _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    @property
    def bytes(self) -> int:
        return self.pieces + TURN_COUNT * self.piece_bytes


@dataclass(frozen=True, slots=True)
class Peers:
    """One rank's view of all buffers, on its device unless noted.

    bases: [size] int64, the address of each rank's buffer, which begins as zeros. word_calls [WORD_PROGRAMS],
    block_calls [BLOCK_PROGRAMS] and meeting_calls [1], int32, zeros at first. missed: [1] int32, whether the last
    meeting timed out. patience: [1] int64, nanoseconds. lost: [1] int32 in pinned host memory, zero until a wait has
    timed out.
    """

    rank: int
    layout: PeerLayout
    bases: torch.Tensor
    word_calls: torch.Tensor
    block_calls: torch.Tensor
    meeting_calls: torch.Tensor
    missed: torch.Tensor
    patience: torch.Tensor
    lost: torch.Tensor

    @classmethod
    def of(
        cls, rank: int, layout: PeerLayout, addresses: list[int], device: torch.device, patience_s: float
    ) -> "Peers":
        """addresses: of each rank's buffer, as this rank's device sees them."""
        return cls(
            rank,
            layout,
            torch.tensor(addresses, dtype=torch.int64, device=device),
            torch.zeros(WORD_PROGRAMS, dtype=torch.int32, device=device),
            torch.zeros(BLOCK_PROGRAMS, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.tensor([int(patience_s * 1e9)], dtype=torch.int64, device=device),
            torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda"),
        )


@triton.jit
def read_bases(bases_ptr, SIZE: tl.constexpr):
    """Load the address of each rank's buffer. They never change, so they may be read before the wait."""
    bases = ()
    for rank in tl.static_range(SIZE):
        bases += (tl.load(bases_ptr + rank),)
    return bases


@triton.jit
def pointer_to(base, offset, TYPE: tl.constexpr):
    """Return a pointer to `offset` bytes, a multiple of 16, into a buffer."""
    return tl.multiple_of((base + offset).to(tl.pointer_type(TYPE)), 16)


@triton.jit
def still_waits(waits, until, patience, patience_ptr, lost_ptr, COMPILED: tl.constexpr):
    """Return whether to look again, and until when: `until` is 0 at first. Scalars: int1 and int64.

    The interpreter has no clock; there each look counts as a nanosecond.
    """
    if COMPILED:
        now = tl.extra.cuda.globaltimer()
        until = tl.where(until == 0, now + patience, until)
        gives_up = waits & (now > until)
    else:
        until += 1
        gives_up = waits & (until > patience)
    tl.store(lost_ptr, 1, mask=gives_up)
    tl.store(patience_ptr, 0, mask=gives_up)
    return waits & (not gives_up), until


@triton.jit
def wait_for_flag(flag_ptr, call, patience, patience_ptr, lost_ptr, COMPILED: tl.constexpr):
    """Wait until a flag has reached `call`, after which the data before it may be read. Return whether it has."""
    missing = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") != call
    waits = missing
    until = tl.zeros([], tl.int64)
    while waits:
        missing = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") != call
        waits, until = still_waits(missing, until, patience, patience_ptr, lost_ptr, COMPILED)
    return not missing
