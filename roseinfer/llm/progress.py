"""Progress bar of a call of `LLM`."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Progress = Callable[[int, int], None]
# Makes a bar, like the class `tqdm.tqdm`.
MakeBar = Callable[..., Any]


@contextmanager
def progress_bar(use_tqdm: bool | MakeBar, total: int) -> Iterator[Progress]:
    """Show a bar while the context runs. Yield a function to call with prompt and output tokens of an ended request.

    `use_tqdm`: True shows the bar if standard error is a terminal; a callable makes it.
    """
    if not use_tqdm:
        yield _no_progress
        return
    make = use_tqdm if callable(use_tqdm) else _tqdm()
    bar = make(
        total=total, desc="Processed prompts", dynamic_ncols=True, **({} if callable(use_tqdm) else {"disable": None})
    )
    began_s, tokens = time.perf_counter(), [0, 0]

    def ended(prompt_tokens: int, output_tokens: int) -> None:
        tokens[0] += prompt_tokens
        tokens[1] += output_tokens
        if not getattr(bar, "disable", False):
            rates = [count / max(time.perf_counter() - began_s, 1e-9) for count in tokens]
            bar.set_postfix_str(f"input {rates[0]:.0f} tokens/s, output {rates[1]:.0f} tokens/s", refresh=False)
        bar.update(1)

    try:
        yield ended
    finally:
        bar.close()


def _tqdm() -> MakeBar:
    from tqdm.auto import tqdm

    return tqdm


def _no_progress(prompt_tokens: int, output_tokens: int) -> None:
    """Show nothing."""
