"""Alternating runs of settings of `bench streaming`, so that a disturbance of the machine affects all of them."""

import gc
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TextIO

from roseinfer.bench.streaming import RunRecord, StreamingLoad, StreamingRun
from roseinfer.config.hub import load_tokenizer
from roseinfer.core.config.engine import EngineConfig
from roseinfer.engine.api import Engine, EngineInfo
from roseinfer.engine.start import start_engine
from roseinfer.text.tokenizer import Tokenizer

BAR_WIDTH_CHARS = 40


@dataclass(frozen=True, slots=True)
class Setting:
    """A load and its engine. `context` is entered while that engine starts and runs."""

    name: str
    engine: EngineConfig
    load: StreamingLoad
    context: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(slots=True)
class SettingRuns:
    """Counted runs of a setting, on engines of the same kind."""

    info: EngineInfo | None = None
    runs: list[RunRecord] = field(default_factory=list)


class ProgressBar:
    """Progress bar on a terminal; silent elsewhere."""

    def __init__(self, total: int, out: TextIO) -> None:
        self._total = total
        self._done = 0
        self._out = out if out.isatty() else None

    def advance(self) -> None:
        self._done += 1
        if self._out is not None:
            filled = BAR_WIDTH_CHARS * self._done // self._total
            bar = "#" * filled + "." * (BAR_WIDTH_CHARS - filled)
            self._out.write(f"\r[{bar}] {self._done}/{self._total} requests")
            self._out.flush()

    def close(self) -> None:
        if self._out is not None:
            self._out.write("\r\x1b[K")
            self._out.flush()


async def measure(settings: Sequence[Setting], out: TextIO | None = None) -> dict[str, SettingRuns]:
    """Return the runs by name of the setting. Settings alternate, run by run: A B, B A, A B, ...

    Settings with equal engines share one. Others get a new engine for each counted run, after its warm-up runs, so that
    only one engine at a time uses memory. All settings have as many runs as the first. Progress goes to `out` (default:
    standard error).
    """
    config = settings[0].load.config
    share = _share_engine(settings)
    warmups = config.warmup_runs * (1 if share else config.repeat_runs)
    requests = sum(setting.load.config.num_requests for setting in settings)
    progress = ProgressBar((warmups + config.repeat_runs) * requests, out or sys.stderr)
    measured = {setting.name: SettingRuns() for setting in settings}
    try:
        if share:
            await _measure_on_one_engine(settings, measured, progress)
        else:
            for setting in _turns(settings, config.repeat_runs):
                await _measure_on_fresh_engine(setting, measured[setting.name], progress)
                _free_memory()
    finally:
        progress.close()
    return measured


def _share_engine(settings: Sequence[Setting]) -> bool:
    first = settings[0]
    return all(setting.engine == first.engine and setting.context is first.context for setting in settings)


def _turns(settings: Sequence[Setting], rounds: int) -> Iterator[Setting]:
    for i in range(rounds):
        yield from reversed(settings) if i % 2 else settings


async def _measure_on_one_engine(
    settings: Sequence[Setting], measured: dict[str, SettingRuns], progress: ProgressBar
) -> None:
    config = settings[0].load.config
    async with _engine(settings[0]) as (engine, tokenizer):
        for number, setting in enumerate(_turns(settings, config.warmup_runs)):
            await _run(engine, tokenizer, setting, f"warm-up {number}", progress)
        for number, setting in enumerate(_turns(settings, config.repeat_runs)):
            result = measured[setting.name]
            result.info = engine.info
            result.runs.append(await _run(engine, tokenizer, setting, f"run {number}", progress))


async def _measure_on_fresh_engine(setting: Setting, result: SettingRuns, progress: ProgressBar) -> None:
    async with _engine(setting) as (engine, tokenizer):
        for number in range(setting.load.config.warmup_runs):
            await _run(engine, tokenizer, setting, f"warm-up {number}", progress)
        result.info = engine.info
        result.runs.append(await _run(engine, tokenizer, setting, "run", progress))


async def _run(engine: Engine, tokenizer: Tokenizer, setting: Setting, name: str, progress: ProgressBar) -> RunRecord:
    return await StreamingRun(engine, tokenizer, setting.load, name, progress.advance).run()


@asynccontextmanager
async def _engine(setting: Setting) -> AsyncIterator[tuple[Engine, Tokenizer]]:
    with setting.context():
        tokenizer = load_tokenizer(setting.engine.model)
        engine = await start_engine(setting.engine, tokenizer, in_process=True)
        try:
            yield engine, tokenizer
        finally:
            await engine.close()


def _free_memory() -> None:
    """Free the last engine's memory: the next engine sizes its KV cache by the free memory."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
