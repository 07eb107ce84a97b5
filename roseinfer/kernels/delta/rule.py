"""The gated delta rule in PyTorch (Yang et al., 2024, "Gated Delta Networks").

For each value head, with the state S [K, V] in float32, for each token in turn:

    S = e^g S;  d = beta (v - S^T k);  S = S + k d^T;  o = S^T q

Shapes: q, k [T, key heads, K], v [T, value heads, V], g and beta [T, value heads], S [value heads, K, V]; all float32.
Queries and keys are normalised before (`unit`). Each key head serves consecutive value heads.
"""

import torch

MAX_CHUNK_TOKENS = 64


def unit(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Return vectors of length `scale` in the direction of x [..., D]."""
    return x * (torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) * scale)


def gates(
    b: torch.Tensor, a: torch.Tensor, decay: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return g = decay * softplus(a + dt_bias) and beta = sigmoid(b), float32; decay: -e^A_log."""
    return decay * torch.nn.functional.softplus(a.float() + dt_bias), b.float().sigmoid()


def serial_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs [T, value heads, V] and the last state, token by token."""
    group = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(group, 1), k.repeat_interleave(group, 1)
    outputs = []
    for token in range(len(q)):
        state = state * g[token].exp()[:, None, None]
        new = beta[token][:, None] * (v[token] - torch.einsum("hkv,hk->hv", state, k[token]))
        state = state + k[token][:, :, None] * new[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", state, q[token]))
    return torch.stack(outputs), state


def one_token_each(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:
    """Return the outputs [n, value heads, V] of one token for each of n sequences. Update their states
    [n, value heads, K, V] in place.
    """
    rows, heads = v.shape[:2]
    group = heads // k.shape[1]
    q, k = (x.repeat_interleave(group, 1).view(rows * heads, 1, -1) for x in (q, k))
    flat = states.view(rows * heads, *states.shape[2:])
    flat *= g.exp().view(-1, 1, 1)
    new = torch.baddbmm(v.reshape(rows * heads, 1, -1), k, flat, alpha=-1) * beta.reshape(-1, 1, 1)
    flat.baddbmm_(k.mT, new)
    return (q @ flat).view(rows, heads, -1)


def chunked_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same as `serial_rule`, in chunks of up to 64 tokens. Only the state's passage from chunk to chunk is
    serial.

    Within a chunk, with G the cumulative g and D_ij = e^(G_i - G_j): A is the part below the diagonal of beta_i (k_i
    k_j) D_ij. The new values are (I + A)^-1 (beta v - beta e^G k S).
    """
    tokens, size = len(q), min(len(q), MAX_CHUNK_TOKENS)
    heads, keys = k.shape[1], k.shape[2]
    q, k, v, g, beta = (_in_chunks(x, size, heads) for x in (q, k, v, g, beta))
    total = g.cumsum(-2)
    # Above the diagonal the exponent may be large.
    decay = (total - total.mT).tril().exp()
    lower = (k @ k.mT * decay * beta).tril(-1)
    mixed = torch.cat((beta * v, beta * total.exp() * k), -1)
    solved = torch.linalg.solve_triangular(lower, mixed, upper=False, unitriangular=True)
    own, read = solved.split((v.shape[-1], keys), -1)
    within = (q @ k.mT * decay).tril()
    q = q * total.exp()
    last = total[..., -1:, :]
    k = k * (last - total).exp()
    state = state.view(heads, -1, *state.shape[1:])
    outputs = []
    for chunk in range(len(q)):
        new = own[chunk] - read[chunk] @ state
        outputs.append(q[chunk] @ state + within[chunk] @ new)
        state = torch.baddbmm((state * last[chunk].exp()).flatten(0, 1), *_stacked(k[chunk], new)).view_as(state)
    output = torch.stack(outputs)  # [chunks, key heads, group, size, V]
    return output.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)[:tokens], state.flatten(0, 1)


def _stacked(k: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return k^T and the new values with one dimension of heads."""
    return k.mT.flatten(0, 1), new.flatten(0, 1)


def _in_chunks(x: torch.Tensor, size: int, heads: int) -> torch.Tensor:
    """Return x [T, heads of its kind, width or nothing] as [chunks, key heads, group, size, width], where group is 1
    for queries and keys and width is 1 for numbers. Missing tokens are zeros, which leave a state as it is.
    """
    x = x.view(len(x), heads, x.shape[1] // heads, -1)
    missing = -len(x) % size
    if missing:
        x = torch.cat((x, x.new_zeros(missing, *x.shape[1:])))
    return x.unflatten(0, (-1, size)).permute(0, 2, 3, 1, 4)
