"""Arguments of the kernels for gated DeltaNet."""

from typing import NamedTuple

import torch


class DeltaInputs(NamedTuple):
    """Projections and weights of a layer with HK key heads and HV value heads of D numbers, its states, and the step.

    mixed: [T, channels] with channels = (2 HK + HV) D; z: [T, HV * D]; gates: [T, 2 HV]: projections, whose rows may be
    apart. conv: [taps, channels], decay and dt_bias: [HV], norm: [D]: weights in float32. memory: [S, HV, D, D]
    float32, window: [S, entries, channels], kept: [S, entries, 2 HV], gates of drafts, if rows may have some: parts of
    the states, strided by slot. An entry is a position modulo `entries`. rows: [12, R], pieces: [P, 4]: int32, as in
    `StateTables`. D is a power of two, at least 16.
    """

    mixed: torch.Tensor
    z: torch.Tensor
    gates: torch.Tensor
    conv: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    memory: torch.Tensor
    window: torch.Tensor
    kept: torch.Tensor | None
    rows: torch.Tensor
    pieces: torch.Tensor
    eps: float
