"""Construction of an engine core: scheduler, runner, and what the options add to them."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from roseinfer.config.hub import states_of_files, tokenizer_folder
from roseinfer.core.adapters import AdapterFiles
from roseinfer.core.clock import MonotonicClock
from roseinfer.core.config.engine import PRICED, EngineConfig
from roseinfer.core.config.speculation import HeadValues
from roseinfer.core.cpu_settings import prepare_cpu_libraries
from roseinfer.core.errors import ConfigError, UnsupportedModelError
from roseinfer.core.observer import StepObserver
from roseinfer.core.recorder import Recorder
from roseinfer.core.runner import Runner, RunnerFacts
from roseinfer.engine.adapters import AdapterRegistry, registry_at_start
from roseinfer.engine.api import EngineInfo
from roseinfer.engine.core import EngineCore
from roseinfer.engine.guided.grammar_cache import GrammarGuideFactory
from roseinfer.engine.record import RecordingCore, engine_recorder
from roseinfer.grammar.library import GrammarTokens, UnsupportedTokenizerError
from roseinfer.integrations.kv_events import KvEventsPublisher
from roseinfer.kv.manager import KvManager
from roseinfer.priced.build import build_priced, priced_adapter_files
from roseinfer.ranks.other_ranks import OtherRanks, RankHost
from roseinfer.sched.adapters import AdapterSlots
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.drafting.build import make_drafting
from roseinfer.sched.drafting.drafting import Drafting
from roseinfer.sched.drafting.marginal import MarginalPricing
from roseinfer.sched.estimates import Estimates, calibrated_cost
from roseinfer.sched.offload import OffloadCosts
from roseinfer.sched.registry import entry_of, make_policy, options_of
from roseinfer.sched.scheduler import Scheduler
from roseinfer.text.tokenizer import Tokenizer

GIB = 2**30


class _EngineRunner(NamedTuple):
    """Runner of an engine. `config`: the options that suit its device. `observer`: the given one, or a tracer if the
    options ask for one. `files`: its reader of adapters.
    """

    config: EngineConfig
    runner: Runner
    facts: RunnerFacts
    observer: StepObserver | None
    files: AdapterFiles | None


def build_engine(
    config: EngineConfig,
    folder: Path,
    observer: StepObserver | None = None,
    learnt: CostParams | None = None,
    *,
    rank_host: RankHost | None = None,
) -> tuple[EngineCore, EngineInfo]:
    """Load the model in `folder` and build an engine core with it.

    `learnt`: step costs that another engine on such a device has learnt. `rank_host`: given if the engine has a process
    to itself. Raise typed errors for what the user can fix.
    """
    started_s = time.monotonic()
    with ExitStack() as undo:
        publisher = None
        if config.kv_events.endpoint is not None:
            # Before the model is loaded: a wrong address fails early, and subscribers can reconnect.
            publisher = KvEventsPublisher(config.kv_events, config.model.model)
            undo.callback(publisher.close)
        model_files = states_of_files(folder)  # before they are read, so that a later change is seen
        record = config.profile.record
        recorder = None if record is None else engine_recorder(record)
        built = _engine_runner(config, folder, observer, rank_host)
        undo.callback(built.runner.close)
        adapters = None if built.files is None else registry_at_start(built.files, config.adapters)
        scheduler = _scheduler(built, learnt, adapters, publisher)
        core = _core(built, scheduler, recorder, adapters, publisher)
        undo.pop_all()
    if publisher is not None:
        publisher.clear()
    startup_s = time.monotonic() - started_s
    return core, _info(built, adapters, model_files, startup_s)


def _engine_runner(
    config: EngineConfig, folder: Path, observer: StepObserver | None, rank_host: RankHost | None
) -> _EngineRunner:
    if config.model.device != PRICED:
        return _model_runner(config, folder, observer, rank_host)
    runner, facts = build_priced(config, folder, tokenizer_folder(config.model))
    if observer is not None:
        runner = _observed(runner, observer)
    return _EngineRunner(config, runner, facts, observer, priced_adapter_files(config.adapters))


def _model_runner(
    config: EngineConfig, folder: Path, observer: StepObserver | None, rank_host: RankHost | None
) -> _EngineRunner:
    prepare_cpu_libraries()
    with ExitStack() as undo:
        others = None
        if config.model.tensor_parallel_size > 1:
            others = OtherRanks(config.model.tensor_parallel_size, rank_host)
            undo.callback(others.close)
            others.start()  # they import PyTorch at the same time as this process
        from roseinfer.runner.build import build_runner
        from roseinfer.runner.device_defaults import fit_to_device

        config = fit_to_device(config, folder)
        if others is None:
            built = build_runner(config, folder)
        else:
            from roseinfer.ranks.build import build_leader

            built, group = build_leader(config, folder, others)
            undo.callback(group.close)
        runner: Runner = built.runner
        observer = observer or _tracer(config, built.facts.device)
        if observer is not None:
            built.runner.observe(observer.span)
            runner = _observed(runner, observer)
        if _overlaps(config, built.facts) and built.facts.device == "cpu":
            from roseinfer.runner.threaded import ThreadedRunner

            runner = ThreadedRunner(runner)
        if others is not None:
            from roseinfer.ranks.leader import LeadingRunner

            runner = LeadingRunner(runner, group, others)
        undo.pop_all()
    return _EngineRunner(config, runner, built.facts, observer, built.adapters)


def _scheduler(
    built: _EngineRunner,
    learnt: CostParams | None,
    adapters: AdapterRegistry | None,
    publisher: KvEventsPublisher | None,
) -> Scheduler:
    config, facts = built.config, built.facts
    kv = KvManager(facts, facts.limits.max_tokens, None if publisher is None else publisher.events)
    options = options_of(config.scheduler)
    estimates = Estimates.of(options, learnt, facts.experts, facts.reads)
    return Scheduler(
        config.scheduler,
        kv,
        make_policy(config.scheduler, estimates),
        facts.max_model_len,
        facts.limits,
        _drafting(config, built.runner, facts, estimates),
        offloading=OffloadCosts.for_policy(options, estimates, facts.load_s, facts.store_s, facts.slot_blocks),
        adapters=None if adapters is None else _adapter_slots(config, facts, adapters, estimates),
    )


def _core(
    built: _EngineRunner,
    scheduler: Scheduler,
    recorder: Recorder | None,
    adapters: AdapterRegistry | None,
    publisher: KvEventsPublisher | None,
) -> EngineCore:
    config, facts = built.config, built.facts
    make_core: Callable[..., EngineCore] = EngineCore
    guides = None
    if recorder is not None:  # a recorded run contains no masks of guides
        make_core = partial(RecordingCore, recorder, experts=facts.experts, reads=facts.reads)
    elif facts.pooling is None:
        guides = _guides(config, facts.vocab_size, facts.eos_token_ids)
    return make_core(
        scheduler,
        built.runner,
        MonotonicClock(),
        depth=2 if _overlaps(config, facts) else 1,
        eos_ids=facts.eos_token_ids,
        vocab_size=facts.vocab_size,
        seed=config.model.seed,
        guides=guides,
        observer=built.observer,
        step_end=publisher,
        pooling=facts.pooling,
        adapters=adapters,
    )


def _info(built: _EngineRunner, adapters: AdapterRegistry | None, files: str, startup_s: float) -> EngineInfo:
    config, facts = built.config, built.facts
    return EngineInfo(
        model=config.model.model,
        facts=replace(facts, startup_s={**facts.startup_s, "engine": startup_s}),
        max_num_seqs=config.scheduler.seats,
        kv_cache=_kv_cache(config, facts),
        policy=entry_of(config.scheduler.policy_name).traits,
        seed=config.model.seed,
        ranks=config.model.tensor_parallel_size,
        calibrated=calibrated_cost(options_of(config.scheduler)),
        adapters=() if adapters is None else tuple(adapters.names.adapters.values()),
        adapters_change=config.adapters.lora_dir is not None,
        files=files,
    )


def _adapter_slots(
    config: EngineConfig, facts: RunnerFacts, adapters: AdapterRegistry, estimates: Estimates
) -> AdapterSlots:
    assert facts.adapters is not None, "a runner that reads adapters has slots for them"
    host_bytes = int(config.adapters.lora_host_size * GIB)
    at_start = list(adapters.names.adapters.values())
    return AdapterSlots(facts.adapters, adapters, host_bytes, at_start, estimates.lengths)


def _drafting(config: EngineConfig, runner: Runner, facts: RunnerFacts, estimates: Estimates) -> Drafting | None:
    """Return drafting by the chosen method, or None without one. The default is off if the engine cannot do it.

    Raise `ConfigError` for a chosen method that the engine cannot do.
    """
    values = config.speculation.values
    if values is None:
        return None
    able = runner.capabilities.ahead if isinstance(values, HeadValues) else runner.capabilities.drafts
    if facts.limits.max_drafts and able:
        share, offloads = config.cache.enable_prefix_caching, facts.num_host_blocks > 0
        overlap = _overlaps(config, facts)
        pricing = MarginalPricing.for_policy(
            options_of(config.scheduler), estimates, offloads=offloads, overlap=overlap
        )
        estimates.yields.by_head = isinstance(values, HeadValues)
        return make_drafting(values, pricing, vocab_size=facts.vocab_size, share_outputs=share)
    if config.speculation.chosen:
        why = "an engine without generated tokens" if facts.pooling else f"device {facts.device}"
        raise ConfigError(f"speculation {config.speculation.speculation!r} is not supported by {why}")
    return None


def _kv_cache(config: EngineConfig, facts: RunnerFacts) -> str:
    """Return the format of K and V for people to read."""
    if not facts.keeps_kv:
        return "none"
    return facts.dtype if config.cache.kv_cache_dtype == "auto" else config.cache.kv_cache_dtype


def _overlaps(config: EngineConfig, facts: RunnerFacts) -> bool:
    """True if a step is planned while the one before it runs."""
    overlap = config.scheduler.overlap
    return facts.device != "cpu" if overlap is None else overlap


def _observed(runner: Runner, observer: StepObserver) -> Runner:
    from roseinfer.runner.trace import ObservedRunner

    return ObservedRunner(runner, observer)


def _guides(config: EngineConfig, vocab_size: int, eos_ids: tuple[int, ...]) -> GrammarGuideFactory:
    """Return a factory that loads the tokenizer in the background. Without one, requests for a grammar are rejected."""

    def tokens() -> GrammarTokens:
        try:
            return GrammarTokens.of(Tokenizer.from_folder(tokenizer_folder(config.model)), vocab_size, eos_ids)
        except UnsupportedModelError as error:
            raise UnsupportedTokenizerError(str(error)) from error

    return GrammarGuideFactory(tokens, vocab_size)


def _tracer(config: EngineConfig, device: str) -> StepObserver | None:
    if config.profile.profile is None:
        return None
    from roseinfer.runner.trace import TraceObserver

    return TraceObserver(config.profile, cuda=device.startswith("cuda"))
