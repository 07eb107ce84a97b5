"""Adapters of random numbers in the slots of a layer."""

import torch

from roseinfer.kernels.lora.slots import SlotMatrices, multiple_of, starts_of
from tests.helpers.skinny import exact_norm

RANKS = (4, 8, 16, 64, 0)
FEW_RANKS = (4, 8, 16, 0)
WIDTHS = {"one module": (40,), "q, k, v": (37, 8, 11), "wide": (256, 128, 128)}


def _padded(rank):
    return -(-rank // 8) * 8


def slot_matrices(device, in_features, widths, dtype, ranks=RANKS, max_rank=64):
    """Return matrices of as many slots as ranks, which are padded with zeros to multiples of 8. What follows them in
    each slot is NaN: nothing may read it.
    """
    modules, slots = len(widths), len(ranks)
    bounds = [sum(widths[:module]) for module in range(modules + 1)]
    a = torch.full((slots, modules * max_rank * in_features), torch.nan, dtype=dtype)
    b = torch.full((slots, bounds[-1] * max_rank), torch.nan, dtype=dtype)
    padded = torch.tensor([_padded(rank) for rank in ranks], dtype=torch.int32)
    arrived = torch.zeros(1, dtype=torch.int32)
    matrices = SlotMatrices(a, b, padded, starts_of(bounds, max_rank, a.device), arrived, modules, max_rank)
    for slot, rank in enumerate(ranks):
        own_a, own_b = matrices.content(slot)
        own_a.copy_(torch.randn(own_a.shape) * in_features**-0.5)
        own_b.copy_(torch.randn(own_b.shape))
        own_a[:, rank:] = own_b[:, rank:] = 0
    on_device = (tensor.to(device) for tensor in matrices[:5])
    return SlotMatrices(*on_device, modules, max_rank, multiple_of(bounds))


def slots_of_rows(device, rows, slots=5):
    """Return a slot for each row, in no order; some rows have none."""
    return ((torch.arange(rows) * 7) % (slots + 1) - 1).to(torch.int32).to(device)


def exact_delta(x, slots, matrices, norm=None):
    """Return what adapters add to the outputs of x after its norm, in float64; zeros for rows without one."""
    wide = exact_norm(x, norm)
    added = torch.zeros(len(x), len(matrices.starts), dtype=torch.float64, device=x.device)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        a, b = matrices.content(slot)
        for module in range(matrices.modules):
            outs = matrices.starts == module * matrices.max_rank
            added[row, outs] = b[outs].double() @ (a[module].double() @ wide[row])
    return added
