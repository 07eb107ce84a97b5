"""Memory that the GPUs of a group write to each other, and what keeps its use in step.

Each rank has one buffer that all of them may write. What a rank pushes goes to a place of its own in every other rank's
buffer, and each program of a kernel has its part of that place: program i of one rank and program i of the others talk
to nobody else. So kernels of any sizes may follow each other, if all ranks launch the same ones.

A program counts its calls, and what it pushes or says carries the count, so that nothing is ever reset. Two places take
turns: a rank that has the others' data of this call knows that they have read what it pushed the call before, and that
place is the one that the next call writes. Counts are in device memory, which makes the kernels replayable in graphs.

Waiting is bounded. Who waited too long says so in host memory, takes NaN for what did not come, so that nobody takes it
for a result, and does not wait again.
"""

from dataclasses import dataclass

import torch

from roseinfer.kernels.common.triton_support import cdiv, tl, triton

TURNS = 2

# Words that carry their count (`push_words`): the payload is a 32-bit word, of which a program takes so many.
WORDS = 512
WORD_PROGRAMS = 128
# Blocks of so many bytes, which a program takes at a time, followed by a flag (`push_blocks`).
BLOCK_PROGRAMS = 128
BLOCK_BYTES = 8192


@dataclass(frozen=True, slots=True)
class PeerLayout:
    """Where things are in a rank's buffer, in bytes from its begin. `limit`: what a rank pushes at most in one call.

    Words [TURNS, size, WORD_PROGRAMS * WORDS] int64; blocks [TURNS, size, BLOCK_PROGRAMS, region] bytes; flags
    [TURNS, size, BLOCK_PROGRAMS] int32.
    """

    size: int
    limit: int

    @property
    def word_limit(self) -> int:
        """What a rank pushes at most in words, in bytes."""
        return min(self.limit, WORD_PROGRAMS * WORDS * 4)

    @property
    def blocks(self) -> int:
        return TURNS * self.size * WORD_PROGRAMS * WORDS * 8

    @property
    def region(self) -> int:
        """Bytes of a program's part of the blocks: whole ones."""
        return cdiv(self.limit, BLOCK_PROGRAMS * BLOCK_BYTES) * BLOCK_BYTES

    @property
    def flags(self) -> int:
        return self.blocks + TURNS * self.size * BLOCK_PROGRAMS * self.region

    @property
    def bytes(self) -> int:
        return self.flags + TURNS * self.size * BLOCK_PROGRAMS * 4


@dataclass(frozen=True, slots=True)
class Peers:
    """One rank's view of all buffers. Where not said otherwise, on its device.

    bases: [size] int64, the address of each rank's buffer, which begins as zeros. word_calls [WORD_PROGRAMS] and
    block_calls [BLOCK_PROGRAMS], int32, zeros at first. patience: [1] int64, nanoseconds. lost: [1] int32 in pinned
    host memory, zero until a wait has been given up.
    """

    rank: int
    layout: PeerLayout
    bases: torch.Tensor
    word_calls: torch.Tensor
    block_calls: torch.Tensor
    patience: torch.Tensor
    lost: torch.Tensor

    @classmethod
    def of(
        cls, rank: int, layout: PeerLayout, addresses: list[int], device: torch.device, patience_s: float
    ) -> "Peers":
        """`addresses`: of each rank's buffer, as this rank's device knows them."""
        return cls(
            rank,
            layout,
            torch.tensor(addresses, dtype=torch.int64, device=device),
            torch.zeros(WORD_PROGRAMS, dtype=torch.int32, device=device),
            torch.zeros(BLOCK_PROGRAMS, dtype=torch.int32, device=device),
            torch.tensor([int(patience_s * 1e9)], dtype=torch.int64, device=device),
            torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda"),
        )


@triton.jit
def read_bases(bases_ptr, SIZE: tl.constexpr):
    """The address of each rank's buffer. They never change, and may be read before preceding kernels have ended."""
    bases = ()
    for rank in tl.static_range(SIZE):
        bases += (tl.load(bases_ptr + rank),)
    return bases


@triton.jit
def pointer_to(base, offset, TYPE: tl.constexpr):
    """To what is `offset` bytes, a multiple of 16, into a buffer."""
    return tl.multiple_of((base + offset).to(tl.pointer_type(TYPE)), 16)


@triton.jit
def still_waits(waits, until, patience, patience_ptr, lost_ptr, COMPILED: tl.constexpr):
    """Whether to look again, and until when: `until` is 0 at first. Scalars: int1 and int64.

    Interpreted, there is no clock, and each look counts as a nanosecond.
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
