"""Moving small values between host and device without making either wait for the other."""

from collections.abc import Sequence

import torch

# Work over rows of a vocabulary goes by slices of this many elements. A CPU then stays within its caches, and its
# allocator within memory that is mapped already: fresh pages cost more than the arithmetic. A GPU wants few launches.
CPU_SLICE_ELEMENTS = 2**19
GPU_SLICE_ELEMENTS = 2**25


def rows_at_once(rows: torch.Tensor) -> int:
    """How many rows of [n, V] to work on at a time."""
    elements = GPU_SLICE_ELEMENTS if rows.device.type == "cuda" else CPU_SLICE_ELEMENTS
    return max(1, elements // rows.shape[1])


def upload(values: Sequence, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of (nested) host numbers on the device.

    To a GPU it goes through pinned memory and does not wait; the caching host allocator keeps the pinned copy until
    the stream has read it.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def start_download(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the host. From a GPU the copy is only queued: record an event after it and wait for that."""
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def write_ranges(
    target: torch.Tensor, rows: Sequence[int], columns: Sequence[int], values: Sequence[Sequence[int]]
) -> None:
    """target[rows[i], columns[i] : columns[i] + len(values[i])] = values[i] for all i, in one scatter.

    target: [R, C], contiguous; the ranges do not overlap.
    """
    lengths = [len(v) for v in values]
    flat = [x for v in values for x in v]
    if not flat:
        return
    width = target.shape[1]
    # Element j of the flat list goes to j + shift, where shift is constant within one range.
    shifts, before = [], 0
    for row, column, length in zip(rows, columns, lengths, strict=True):
        shifts.append(row * width + column - before)
        before += length
    layout = upload([shifts, lengths], torch.int64, target.device)
    where = torch.repeat_interleave(layout[0], layout[1], output_size=before)
    where += torch.arange(before, device=target.device)
    target.view(-1).index_copy_(0, where, upload(flat, target.dtype, target.device))
