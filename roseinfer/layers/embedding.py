"""Both ends of a model: from token ids to rows of a table, and from hidden states to logits."""

from copy import copy

import torch
import torch.nn.functional as F

from roseinfer.kernels.common.availability import has_triton
from roseinfer.parallel.group import Share
from roseinfer.quant.base import Build, Matmul, Norm, Table, WeightSource

# cuBLAS is several times slower if rows of a result begin at unaligned addresses, as with GPT-2's 50,257 logits.
_GPU_MULTIPLE_ROWS = 64


class Embedding:
    """Table of positions: ids [T] -> rows [T, width] of [count, width]. Every process holds all of it."""

    def __init__(self, count: int, width: int) -> None:
        self._shape = (count, width)
        self._table: torch.Tensor

    def load(self, source: WeightSource, name: str) -> None:
        build = source.build
        self._table = torch.empty(self._shape, dtype=build.dtype, device=build.device)
        source.read(f"{name}.weight", self._table)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self._table)


class VocabTable:
    """Matrix [vocab, width] whose rows are split among the processes in equal, contiguous shares.

    rows: this process's [share, width], with rows of zeros after the end of the vocabulary. A GPU's share is rounded up
    to a number that it multiplies fast, and `on_gpu` is the matrix in that form.
    """

    rows: Table

    def __init__(self, vocab: int, width: int, build: Build) -> None:
        align = _GPU_MULTIPLE_ROWS if build.device.type == "cuda" else 1
        size = build.group.size
        self.share = -(-vocab // (size * align)) * align
        self.start = build.group.rank * self.share
        self._vocab, self._width = vocab, width
        self.on_gpu: torch.Tensor | None = None

    def load(self, source: WeightSource, name: str) -> None:
        build, width = source.build, self._width
        rows = torch.empty((self.share, width), dtype=build.dtype, device=build.device)
        held = max(0, min(self._vocab - self.start, self.share))
        rows[held:].zero_()
        if held:
            part = (Share(self.start, held, self._vocab), Share(0, width, width))
            source.read(name, rows[:held], shard=part)
        else:
            source.skip(name)
        self.rows = build.weight_format.table(rows)
        self.on_gpu = rows if has_triton(build.device) else None


class VocabEmbedding:
    """Rows of the vocabulary's table: ids [T] -> [T, width]. Each process holds a share of the table."""

    table: VocabTable

    def __init__(self, vocab: int, width: int) -> None:
        self._shape = (vocab, width)

    def load(self, source: WeightSource, name: str) -> None:
        self._group = source.build.group
        self.table = VocabTable(*self._shape, source.build)
        self.table.load(source, f"{name}.weight")

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        table = self.table
        if self._group.size == 1:
            return table.rows.look_up(ids)
        if table.on_gpu is not None:
            from roseinfer.kernels.sampling.vocab_rows import vocab_rows

            return self._group.all_reduce(vocab_rows(ids, table.on_gpu, table.start))
        local = ids - table.start
        elsewhere = (local < 0) | (local >= table.share)
        rows = table.rows.look_up(local.masked_fill(elsewhere, 0))
        return self._group.all_reduce(rows.masked_fill_(elsewhere[:, None], 0.0))


class LMHead:
    """Logits of norm(hidden): hidden [L, width] -> [L, vocab].

    Where `VocabTable` pads, the product has a few columns more than the vocabulary; they are cut off.
    """

    padded_vocab: int

    def __init__(self, norm: Norm, width: int, vocab: int) -> None:
        self._norm = norm
        self._width, self._vocab = width, vocab
        self._matmul: Matmul

    def load(self, source: WeightSource, norm: str, name: str | None, embedding: VocabEmbedding | None) -> None:
        """name: of the head's matrix; None if it is the embedding's."""
        if name is not None:
            table = VocabTable(self._vocab, self._width, source.build)
            table.load(source, f"{name}.weight")
        else:
            assert embedding is not None, "the head has no matrix of its own"
            table = embedding.table
        self._norm.load(source, norm)
        self._group = source.build.group
        self._matmul = table.rows.head()
        self.padded_vocab = table.share * self._group.size

    def after(self, norm: Norm) -> "LMHead":
        """Return a head that shares the matrix and applies another norm, which is loaded."""
        other = copy(self)
        other._norm = norm
        return other

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._norm(hidden)

    def __call__(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """out: [L, padded_vocab]; the result is then a view of it."""
        if hidden.shape[0] == 0:
            return hidden.new_empty((0, self._vocab))
        if self._group.size == 1:
            return self._matmul.after(self._norm, hidden, out)[:, : self._vocab]
        return self._group.gather(self._matmul.after(self._norm, hidden), out)[:, : self._vocab]
