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


PARTS = ("tiles", "route", "few")
KINDS = ("fp8", "bf16")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    few, many: numbers of tokens; of many, groups whose cells are searched together, what matters most first. parts: of
    which better cuts are searched. most_cuts: of a cell, that a step tries. tiny: a dry run, without a GPU.
    """

    size: Size = field(default_factory=Size)
    few: tuple[int, ...] = (1, 2, 4, 8, 16)
    many: tuple[tuple[int, ...], ...] = ((2048, 8192), (64, 128, 256), (32, 16, 512), (8,))
    parts: tuple[str, ...] = PARTS
    kinds: tuple[str, ...] = KINDS
    tiny: bool = False
    most_cuts: int | None = None


TINY = Plan(Size(128, 128, 4, 2), few=(2,), many=((20,),), tiny=True, most_cuts=2)
