"""Ranks that push to each other's memory without several GPUs: as processes under Triton's interpreter, or as streams
of the one GPU there is."""

import mmap
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from roseinfer.kernels.comm.peers import PeerLayout, Peers

Work = Callable[[Peers], list[torch.Tensor]]


def run_ranks(work: Work, layout: PeerLayout, device: torch.device, out: Path, patience_s: float = 1e-4) -> list[list]:
    """Run `work` on each rank and return its results. It makes its inputs, launches kernels, and does not wait.

    patience_s: of the interpreter, to which a look is a nanosecond.
    """
    if device.type == "cuda":
        return _on_streams(work, layout, device)
    memory = [mmap.mmap(-1, layout.bytes) for _ in range(layout.size)]  # shared with forks
    buffers = [torch.frombuffer(part, dtype=torch.uint8) for part in memory]
    addresses = [buffer.data_ptr() for buffer in buffers]
    children = []
    for rank in range(1, layout.size):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads take no part
            child = os.fork()
        if child == 0:
            _work_and_exit(work, Peers.of(rank, layout, addresses, device, patience_s), out / f"rank-{rank}.pt")
        children.append(child)
    try:
        results = [work(Peers.of(0, layout, addresses, device, patience_s))]
        for rank, child in enumerate(children, 1):
            _, status = os.waitpid(child, 0)
            assert status == 0, f"rank {rank}"
            results.append(torch.load(out / f"rank-{rank}.pt"))
    finally:
        for child in children:
            with suppress(ProcessLookupError, ChildProcessError):  # it has been waited for
                os.kill(child, 9)
                os.waitpid(child, 0)
    return results


def _work_and_exit(work: Work, peers: Peers, file: Path) -> None:
    status = 1
    try:
        torch.set_num_threads(1)  # a fork has none of the threads that its parent's pool counts on
        torch.save(work(peers), file)
        status = 0
    except BaseException:
        traceback.print_exc(file=sys.stderr)
    finally:
        os._exit(status)


def _on_streams(work: Work, layout: PeerLayout, device: torch.device) -> list[list]:
    """First each rank by itself, waiting for nobody: to load a kernel may take until those that run have ended."""
    for patience_s in (0.0, 60.0):
        buffers = [torch.zeros(layout.bytes, dtype=torch.uint8, device=device) for _ in range(layout.size)]
        addresses = [buffer.data_ptr() for buffer in buffers]
        ranks = [Peers.of(rank, layout, addresses, device, patience_s) for rank in range(layout.size)]
        torch.cuda.synchronize()
        results = []
        for peers in ranks:
            with torch.cuda.stream(torch.cuda.Stream()):
                results.append(work(peers))
        torch.cuda.synchronize()
    return results
