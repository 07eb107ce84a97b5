"""The layers that `experts_cuts` measures, and at which numbers of tokens."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Size:
    """Of a layer: `experts` of `width`, of which a token has `top_k`, in a model of `hidden`."""

    hidden: int = 2048
    width: int = 768
    experts: int = 128
    top_k: int = 8

    def weight_bytes(self, experts: float, element: int) -> float:
        """Of so many experts and the router, without scales."""
        return experts * 3 * self.width * self.hidden * element + 2 * self.experts * self.hidden

    def flops(self, tokens: int) -> float:
        return 6.0 * tokens * self.top_k * self.width * self.hidden


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: numbers of tokens, those that matter most first. most_cuts: of a cell, that a
    step tries. tiny: a dry run, without a GPU."""

    size: Size = field(default_factory=Size)
    few: tuple[int, ...] = (1, 2, 4, 8, 16)
    many_first: tuple[int, ...] = (64, 128, 256, 2048)
    many_then: tuple[int, ...] = (8, 16, 32, 512, 8192)
    tiny: bool = False
    most_cuts: int | None = None

    @property
    def many(self) -> tuple[int, ...]:
        return self.many_first + self.many_then


TINY = Plan(Size(128, 128, 4, 2), few=(2,), many_first=(20,), many_then=(), tiny=True, most_cuts=2)
