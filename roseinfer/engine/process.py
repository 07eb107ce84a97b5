"""Engine process: build an engine core from scheduler and runner, and serve it."""

import logging
import select
import shutil
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from roseinfer.config.hub import states_of_files, tokenizer_folder
from roseinfer.core.adapters import AdapterFiles
from roseinfer.core.clock import MonotonicClock
from roseinfer.core.config.engine import PRICED, EngineConfig
from roseinfer.core.config.speculation import HeadValues
from roseinfer.core.cpu_settings import prepare_cpu_libraries
from roseinfer.core.errors import ConfigError, RoseinferError, UnsupportedModelError
from roseinfer.core.garbage import IdleGarbageCollector
from roseinfer.core.observer import StepObserver
from roseinfer.core.progress import listening
from roseinfer.core.promise import Promise
from roseinfer.core.recorder import Recorder
from roseinfer.core.runner import Runner, RunnerFacts
from roseinfer.core.stacks import enable_stack_dumps, stacks_path
from roseinfer.engine.adapters import AdapterRegistry, registry_at_start
from roseinfer.engine.api import EngineInfo
from roseinfer.engine.core import EngineCore
from roseinfer.engine.guided.grammar_cache import GrammarGuideFactory
from roseinfer.engine.loop import EngineLoop
from roseinfer.engine.messages import Ready, StartFailed
from roseinfer.engine.process_transport import ENGINE_ROWS, EngineBoot, PeerBoot
from roseinfer.engine.record import RecordingCore, engine_recorder
from roseinfer.engine.sockets import ClientSockets, PeerSource
from roseinfer.grammar.library import GrammarTokens, UnsupportedTokenizerError
from roseinfer.integrations.kv_events import KvEventsPublisher
from roseinfer.kv.manager import KvManager
from roseinfer.priced.build import build_priced, priced_adapter_files
from roseinfer.processes.child import ErrorReport, exit_with_parent, ignore_terminal_signals, read_boot
from roseinfer.processes.shared_rows import SharedRows
from roseinfer.processes.start_log import LoggedStages
from roseinfer.ranks.other_ranks import OtherRanks, RankHost
from roseinfer.sched.adapters import AdapterSlots
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.drafting.build import make_drafting
from roseinfer.sched.drafting.drafting import Drafting
from roseinfer.sched.drafting.marginal import MarginalPricing
from roseinfer.sched.estimates import CostOptions, Estimates, calibrated_cost
from roseinfer.sched.idle_audit import IdleAudit
from roseinfer.sched.offload import OffloadCosts
from roseinfer.sched.registry import entry_of, make_policy, options_of
from roseinfer.sched.scheduler import Scheduler
from roseinfer.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # it imports PyTorch
    from roseinfer.runner.build import BuiltRunner

log = logging.getLogger("roseinfer.engine")

# Time for an engine to end by itself after its owner has ended.
EXIT_TIMEOUT_S = 5.0
GIB = 2**30
LAST_MESSAGES_TIMEOUT_S = 1.0
# The kernel closes the descriptors of a killed owner one after the other, within this time.
OWNER_CLOSES_S = 1.0


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
    if config.kv_events.endpoint is None:
        return _build(config, folder, observer, learnt, None, rank_host)
    # Before the model is loaded: a wrong address fails early, and subscribers can reconnect.
    publisher = KvEventsPublisher(config.kv_events, config.model.model)
    try:
        built = _build(config, folder, observer, learnt, publisher, rank_host)
    except BaseException:
        publisher.close()
        raise
    publisher.clear()
    return built


def _build(
    config: EngineConfig,
    folder: Path,
    observer: StepObserver | None,
    learnt: CostParams | None,
    publisher: KvEventsPublisher | None,
    rank_host: RankHost | None,
) -> tuple[EngineCore, EngineInfo]:
    started_s = time.monotonic()
    model_files = states_of_files(folder)  # before they are read, so that a later change is seen
    record = config.profile.record
    recorder = None if record is None else engine_recorder(record)
    files: AdapterFiles | None = None
    if config.model.device == PRICED:
        runner, facts = build_priced(config, folder, tokenizer_folder(config.model))
        files = priced_adapter_files(config.adapters)
        if observer is not None:
            runner = _observed(runner, observer)
    else:
        config, built, runner, observer = _build_runner(config, folder, observer, rank_host)
        facts, files = built.facts, built.adapters
    try:
        core, info = _build_core(config, runner, facts, observer, learnt, publisher, recorder, files, started_s)
    except BaseException:
        runner.close()
        raise
    return core, replace(info, files=model_files)


def _build_core(
    config: EngineConfig,
    runner: Runner,
    facts: RunnerFacts,
    observer: StepObserver | None,
    learnt: CostParams | None,
    publisher: KvEventsPublisher | None,
    recorder: Recorder | None,
    files: AdapterFiles | None,
    started_s: float,
) -> tuple[EngineCore, EngineInfo]:
    kv = KvManager(
        facts.num_blocks,
        config.cache.block_size,
        prefix_caching=config.cache.enable_prefix_caching,
        spare_from=facts.spare_from,
        num_host_blocks=facts.num_host_blocks,
        num_host_slots=facts.num_host_slots,
        events=None if publisher is None else publisher.events,
        windows=facts.windows,
        states=facts.states,
        step_tokens=facts.limits.max_tokens,
    )
    adapters = None if files is None else registry_at_start(files, config.adapters)
    options = options_of(config.scheduler)
    estimates = Estimates.of(options, learnt, facts.experts, facts.reads)
    scheduler = Scheduler(
        config.scheduler,
        kv,
        make_policy(config.scheduler, estimates),
        facts.max_model_len,
        facts.limits,
        _drafting(config, runner, facts, estimates),
        offloading=OffloadCosts.for_policy(options, estimates, facts.load_s, facts.store_s, facts.slot_blocks),
        adapters=None if adapters is None else _adapter_slots(config, facts, adapters, estimates),
    )
    # A recorded run contains no masks of guides.
    guided = recorder is None and facts.pooling is None
    guides = None if not guided else _guides(config, facts.vocab_size, facts.eos_token_ids)
    make_core: Callable[..., EngineCore] = EngineCore
    if recorder is not None:
        make_core = partial(RecordingCore, recorder, experts=facts.experts, reads=facts.reads)
    core = make_core(
        scheduler,
        runner,
        MonotonicClock(),
        depth=2 if _overlaps(config, facts) else 1,
        eos_ids=facts.eos_token_ids,
        vocab_size=facts.vocab_size,
        seed=config.model.seed,
        guides=guides,
        observer=observer,
        step_end=publisher,
        pooling=facts.pooling,
        adapters=adapters,
    )
    info = EngineInfo(
        model=config.model.model,
        facts=replace(facts, startup_s={**facts.startup_s, "engine": time.monotonic() - started_s}),
        block_size=config.cache.block_size,
        max_num_seqs=config.scheduler.seats,
        kv_cache=_kv_cache(config, facts),
        policy=entry_of(config.scheduler.policy_name).traits,
        seed=config.model.seed,
        prefix_caching=config.cache.enable_prefix_caching,
        ranks=config.model.tensor_parallel_size,
        calibrated=calibrated_cost(options),
        adapters=() if adapters is None else tuple(adapters.names.adapters.values()),
        adapters_change=config.adapters.lora_dir is not None,
    )
    return core, info


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
        others_learn = isinstance(options_of(config.scheduler), CostOptions) or facts.num_host_blocks > 0
        overlap, share = _overlaps(config, facts), config.cache.enable_prefix_caching
        pricing = MarginalPricing(estimates.cost, estimates.yields, learns=not others_learn, overlap=overlap)
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


def _build_runner(
    config: EngineConfig, folder: Path, observer: StepObserver | None, rank_host: RankHost | None
) -> "tuple[EngineConfig, BuiltRunner, Runner, StepObserver | None]":
    """Return the options that suit the device, what was built, the runner to use instead of its own, and its observer.

    The observer is `observer`, or a tracer if the options ask for one.
    """
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
    return config, built, runner, observer


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


def main(peers_from: Callable[[PeerBoot], PeerSource] | None = None) -> int:
    """Serve an engine until it is shut down, or until its owner has ended. Standard input: an `EngineBoot`.

    `peers_from`: creates the source of connections from other hosts, for an engine that accepts them.
    """
    ignore_terminal_signals()
    boot = read_boot(EngineBoot)
    boot.log.apply(engine=boot.index if boot.config.engines > 1 else None)
    folder = Path(boot.folder)
    enable_stack_dumps(stacks_path(folder, boot.index))
    # A dead owner cannot remove its folder. The loop notices its end too, but not during a step that hangs.
    exit_with_parent(EXIT_TIMEOUT_S, partial(shutil.rmtree, folder, ignore_errors=True))
    clients = ClientSockets(socket.socket(fileno=boot.listener))
    try:
        return _serve(boot, clients, peers_from)
    finally:
        orphaned = not clients.owned and _owner_has_gone(sys.stdin.fileno())
        clients.close(LAST_MESSAGES_TIMEOUT_S)
        if orphaned:
            shutil.rmtree(folder, ignore_errors=True)


def _serve(boot: EngineBoot, clients: ClientSockets, peers_from: Callable[[PeerBoot], PeerSource] | None) -> int:
    def start_failed(error: BaseException) -> None:
        report = ErrorReport.of(error)
        clients.greet(StartFailed(report.kind, report.message))

    rank_host = RankHost(Path(boot.folder), boot.index, several=boot.config.engines > 1, report_error=start_failed)
    try:
        if boot.peers is not None and peers_from is not None:
            clients.accept_peers(peers_from(boot.peers))
        rows = None if boot.rows is None else SharedRows.open(Path(boot.rows), ENGINE_ROWS)
        with listening(LoggedStages()):
            learnt = None if boot.costs is None else CostParams.of(boot.costs)
            core, info = build_engine(boot.config, Path(boot.model_folder), learnt=learnt, rank_host=rank_host)
    except RoseinferError as error:
        start_failed(error)
        return 1
    except Exception as error:
        log.exception("the engine failed to start")
        start_failed(error)
        return 1
    clock = MonotonicClock()
    garbage = IdleGarbageCollector(clock)
    clients.greet(Ready(info))
    audit = IdleAudit(core.scheduler, clock) if boot.config.scheduler.idle_checks else None
    return 0 if EngineLoop(core, clients, clients, clock, garbage, audit, _publisher(boot, rows, clients)).run() else 1


def _publisher(
    boot: EngineBoot, rows: SharedRows[Promise] | None, clients: ClientSockets
) -> Callable[[Promise], None] | None:
    """Return the function that publishes the engine's promises: to shared memory and to clients on other hosts."""
    if rows is None:
        return None
    write: Callable[[Promise], None] = partial(rows.write, boot.index)
    if boot.peers is None:
        return write

    def publish(promise: Promise) -> None:
        write(promise)
        clients.publish(promise)

    return publish


def _owner_has_gone(stdin: int) -> bool:
    """True if the owner has ended and so cannot remove its folder, which other engines may use too."""
    ends = select.poll()
    ends.register(stdin, select.POLLIN)
    return bool(ends.poll(OWNER_CLOSES_S * 1000))


if __name__ == "__main__":
    sys.exit(main())
