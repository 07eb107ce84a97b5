"""Division of a model's layers into KV groups, without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from roseinfer.attention.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class KVGroups:
    """Layers that keep K and V of the same tokens form a group, with block tables and a pool of blocks of its own.

    group_of: number of each layer's group. windows: of each group after the first, whose layers see only so many
    tokens. The first group keeps all tokens.
    """

    group_of: tuple[int, ...]
    windows: tuple[int, ...] = ()

    @classmethod
    def single(cls, num_layers: int) -> Self:
        """Return one group of all layers."""
        return cls((0,) * num_layers)

    @classmethod
    def by_window(cls, specs: Sequence[AttentionSpec], context: int) -> Self:
        """Return the first group of layers without a window, and a group for each distinct window.

        A window of at least `context` tokens, the longest context, counts as none. A model without layers for the
        first group keeps one group of all layers.
        """
        windows = [None if spec.window is None or spec.window >= context else spec.window for spec in specs]
        if None not in windows:
            return cls.single(len(windows))
        order = sorted({window for window in windows if window is not None})
        return cls(tuple(0 if window is None else 1 + order.index(window) for window in windows), tuple(order))

    @property
    def count(self) -> int:
        return 1 + len(self.windows)

    def specs_of(self, group: int, specs: Sequence[AttentionSpec]) -> list[AttentionSpec]:
        """Return those of the group's layers. specs: of all layers."""
        return [spec for spec, number in zip(specs, self.group_of, strict=True) if number == group]
