"""Options of `roseinfer calibrate`."""

from dataclasses import dataclass

from roseinfer.core.config.option import check_positive, option, positive_numbers


@dataclass(frozen=True, slots=True)
class CalibrationGrid:
    """Decoding requests, their context in tokens, prompt tokens beside them; `repeats` steps of each kind.

    `prefixes`: tokens that come before such a prompt and are in the cache, beside requests with the shortest contexts.
    """

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    repeats: int = 3
    prefixes: tuple[int, ...] = ()


# What takes seconds with the embedded model on two cores, and less than a minute with 8B parameters on a large GPU.
CPU_GRID = CalibrationGrid(rows=(1, 2, 4, 8, 16), contexts=(32, 128, 512), prompts=(16, 64, 256), prefixes=(1024,))
GPU_GRID = CalibrationGrid(
    rows=(1, 8, 32, 128, 256), contexts=(64, 512, 2048), prompts=(32, 128, 512, 2048), prefixes=(8192, 28_672)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateConfig:
    """Options for the steps to measure. Steps that exceed the engine's seats, context or cache are left out."""

    decode_rows: str | None = option(None, "requests that decode at once: a,b,...", metavar="N,N,...")
    context_lens: str | None = option(None, "tokens that each of them has, to begin with: a,b,...", metavar="N,N,...")
    prompt_lens: str | None = option(None, "prompt tokens computed beside them: a,b,...", metavar="N,N,...")
    prefix_lens: str | None = option(
        None, "tokens before such prompts that are in the prefix cache: a,b,... (0 = none)", metavar="N,N,..."
    )
    repeats: int = option(3, "steps of each kind")
    recorded: str | None = option(None, "fit to the steps of a recorded run instead of a sweep", metavar="FILE")
    json: str | None = option(None, "write the cost model to this file", metavar="FILE", written=True)

    def __post_init__(self) -> None:
        check_positive(self, "repeats")
        self.grid(CPU_GRID)

    def grid(self, default: CalibrationGrid) -> CalibrationGrid:
        """Return the given grid, completed from `default`. Raise `ConfigError`."""
        return CalibrationGrid(
            rows=positive_numbers("decode_rows", self.decode_rows, int) or default.rows,
            contexts=positive_numbers("context_lens", self.context_lens, int) or default.contexts,
            prompts=positive_numbers("prompt_lens", self.prompt_lens, int) or default.prompts,
            repeats=self.repeats,
            prefixes=_prefixes(self.prefix_lens, default.prefixes),
        )


def _prefixes(text: str | None, default: tuple[int, ...]) -> tuple[int, ...]:
    if text is not None and text.strip() == "0":
        return ()
    return positive_numbers("prefix_lens", text, int) or default
