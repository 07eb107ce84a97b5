"""How a model with experts chooses among them, as far as schedulers and cost models need to know."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """In each layer with experts, every token is computed by `top_k` of `count`."""

    count: int
    top_k: int

    def read(self, tokens: float) -> float:
        """The mean number of distinct experts that a layer reads for so many tokens (inf: for ever more).

        `count * (1 - (1 - top_k / count) ** tokens)`, for tokens that choose independently and like all alike.
        """
        return self.count * (1 - (1 - self.top_k / self.count) ** tokens)
