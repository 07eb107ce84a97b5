"""Shape of a layer of gated DeltaNet, as plain data; without torch."""

from dataclasses import dataclass, replace

from roseinfer.core.errors import ConfigError
from roseinfer.state.spec import StatePart, StateSpec

# Names of the parts of its state.
MEMORY, WINDOW, GATES = "memory", "window", "gates"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec:
    """Linear attention by the gated delta rule (Yang et al., 2024, "Gated Delta Networks").

    Each key head serves value_heads / key_heads consecutive value heads. taps: tokens that the causal convolution over
    queries, keys and values reads.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def keys(self) -> int:
        """Width of all keys of a token."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all values of a token."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Width of what is convolved: queries, keys, values."""
        return 2 * self.keys + self.values

    def state(self, dtype: str, row_drafts: int = 0) -> StateSpec:
        """Return what the layer keeps: for each value head a matrix in float32, and the last inputs of the convolution
        in `dtype`, that of the model. row_drafts: most drafts of a row.

        The input at position p is entry p % entries of the window. So the entry that a token overwrites is one that no
        other part of the step reads: the convolution at p reads p - taps + 1 to p. Inputs of drafts stay in the window
        until the next row replays them, which may have as many drafts itself. Their gates are kept in the same way.
        """
        entries = self.taps + 2 * row_drafts
        memory = StatePart(MEMORY, (self.value_heads, self.key_dim, self.value_dim), "float32")
        window = StatePart(WINDOW, (entries, self.channels), dtype)
        gates = (StatePart(GATES, (entries, 2 * self.value_heads), dtype),) if row_drafts else ()
        return StateSpec((memory, window, *gates))

    def held(self, ranks: int) -> "DeltaSpec":
        """Return one rank's part of the layer. Raise `ConfigError` if the heads cannot be divided evenly."""
        if self.key_heads % ranks:
            raise ConfigError(
                f"tensor_parallel_size is {ranks}, but the model's {self.key_heads} heads of linear attention cannot "
                f"be divided evenly among {ranks} processes"
            )
        return replace(self, key_heads=self.key_heads // ranks, value_heads=self.value_heads // ranks)
