"""The engine process, and the one place where scheduler and runner meet."""

import logging
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from roseinfer.config.hub import tokenizer_folder
from roseinfer.core import logs
from roseinfer.core.clock import MonotonicClock
from roseinfer.core.config.engine import PRICED, EngineConfig
from roseinfer.core.cpu_settings import prepare_cpu_libraries
from roseinfer.core.errors import RoseinferError, UnsupportedModelError
from roseinfer.core.garbage import IdleGarbageCollector
from roseinfer.core.observer import StepObserver
from roseinfer.core.progress import listening
from roseinfer.core.promise import Promise
from roseinfer.core.runner import Runner, RunnerFacts
from roseinfer.core.stacks import enable_stack_dumps, stacks_path
from roseinfer.engine.api import EngineInfo
from roseinfer.engine.audit import IdleAudit
from roseinfer.engine.board import Board
from roseinfer.engine.core import Core, EngineCore
from roseinfer.engine.guided.grammar_cache import GrammarGuideFactory
from roseinfer.engine.kv_events import KvEventsPublisher
from roseinfer.engine.loop import EngineLoop
from roseinfer.engine.messages import Ready, StartFailed
from roseinfer.engine.own_process import EngineBoot
from roseinfer.engine.record import Recorder, RecordingCore
from roseinfer.engine.sockets import ClientSockets
from roseinfer.engine.starting import LoggedStages
from roseinfer.grammar.library import GrammarTokens, UnsupportedTokenizerError
from roseinfer.kv.manager import KvManager
from roseinfer.priced.build import build_priced
from roseinfer.ranks.others import Home, OtherRanks
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.offload import OffloadCosts
from roseinfer.sched.registry import entry_of, make_policy, options_of
from roseinfer.sched.scheduler import Scheduler
from roseinfer.text.tokenizer import Tokenizer

log = logging.getLogger("roseinfer.engine")

EXIT_PATIENCE_S = 5.0
LAST_WORDS_S = 1.0
# An owner that was killed lets go of one thing after the other.
FAREWELL_S = 1.0


def build_engine(
    config: EngineConfig,
    folder: Path,
    observer: StepObserver | None = None,
    learnt: CostParams | None = None,
    *,
    home: Home | None = None,
) -> tuple[Core, EngineInfo]:
    """Load the model in `folder` and put an engine core around it; `observer` is told of every step.

    `learnt`: what steps cost, as an engine on such a device has learnt. `home`: of an engine that has a
    process to itself. Raises typed errors for what the user can mend.
    """
    if config.kv_events.endpoint is None:
        return _build(config, folder, observer, learnt, None, home)
    # Before the model is loaded: an address that cannot be had is told soon, and subscribers find their way back.
    publisher = KvEventsPublisher(config.kv_events, config.model.model)
    try:
        built = _build(config, folder, observer, learnt, publisher, home)
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
    home: Home | None,
) -> tuple[Core, EngineInfo]:
    started = time.monotonic()
    record = config.profile.record
    recorder = None if record is None else Recorder(record)
    if config.model.device == PRICED:
        runner, facts = build_priced(config, folder, tokenizer_folder(config.model))
        if observer is not None:
            runner = _observed(runner, observer)
    else:
        config, runner, facts, observer = _build_runner(config, folder, observer, home)
    try:
        return _build_core(config, runner, facts, observer, learnt, publisher, recorder, started)
    except BaseException:
        runner.close()
        raise


def _build_core(
    config: EngineConfig,
    runner: Runner,
    facts: RunnerFacts,
    observer: StepObserver | None,
    learnt: CostParams | None,
    publisher: KvEventsPublisher | None,
    recorder: Recorder | None,
    started: float,
) -> tuple[Core, EngineInfo]:
    """`started`: when the engine began to start, in seconds of the monotonic clock."""
    kv = KvManager(
        facts.num_blocks,
        config.cache.block_size,
        prefix_caching=config.cache.enable_prefix_caching,
        spare_from=facts.spare_from,
        num_host_blocks=facts.num_host_blocks,
        events=None if publisher is None else publisher.events,
    )
    options = options_of(config.scheduler)
    estimates = Estimates.of(options, learnt, facts.experts)
    scheduler = Scheduler(
        config.scheduler,
        kv,
        make_policy(config.scheduler, estimates),
        facts.max_model_len,
        facts.limits,
        offloading=OffloadCosts.for_policy(options, estimates, facts.load_s, facts.store_s),
    )
    # The recording of a run has no place for what a guide said.
    guides = None if recorder is not None else _guides(config, facts.vocab_size, facts.eos_token_ids)
    make_core: Callable[..., Core] = EngineCore
    if recorder is not None:
        make_core = partial(RecordingCore, recorder, experts=facts.experts)
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
    )
    info = EngineInfo(
        model=config.model.model,
        facts=replace(facts, startup_s={**facts.startup_s, "engine": time.monotonic() - started}),
        block_size=config.cache.block_size,
        max_num_seqs=config.scheduler.seats,
        kv_cache=facts.dtype if config.cache.kv_cache_dtype == "auto" else config.cache.kv_cache_dtype,
        policy=entry_of(config.scheduler.policy_name).traits,
        seed=config.model.seed,
        prefix_caching=config.cache.enable_prefix_caching,
        ranks=config.model.tensor_parallel_size,
    )
    return core, info


def _build_runner(
    config: EngineConfig, folder: Path, observer: StepObserver | None, home: Home | None
) -> tuple[EngineConfig, Runner, RunnerFacts, StepObserver | None]:
    """The options that suit the device, a runner with a model, and who observes it already: `observer`, or one that the
    options ask for.
    """
    prepare_cpu_libraries()
    with ExitStack() as undo:
        others = None
        if config.model.tensor_parallel_size > 1:
            others = OtherRanks(config.model.tensor_parallel_size, home)
            undo.callback(others.close)
            others.start()  # they import PyTorch while we do
        from roseinfer.runner.build import build_runner
        from roseinfer.runner.device_defaults import fit_to_device

        config = fit_to_device(config)
        if others is None:
            built = build_runner(config, folder)
        else:
            from roseinfer.ranks.build import build_led

            built, group = build_led(config, folder, others)
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
    return config, runner, built.facts, observer


def _overlaps(config: EngineConfig, facts: RunnerFacts) -> bool:
    """Whether a step is planned while the one before it runs."""
    overlap = config.scheduler.overlap
    return facts.device != "cpu" if overlap is None else overlap


def _observed(runner: Runner, observer: StepObserver) -> Runner:
    from roseinfer.runner.trace import ObservedRunner

    return ObservedRunner(runner, observer)


def _guides(config: EngineConfig, vocab_size: int, eos_ids: tuple[int, ...]) -> GrammarGuideFactory:
    """Reads the tokenizer while the engine is already at work; without one, requests for a grammar are refused."""

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


def main() -> int:
    """Serve an engine: read an `EngineBoot` line from standard input, run until told to stop or left alone."""
    # Terminals and service managers send these to the whole group; the owner decides what they mean.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    boot = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineBoot)
    engine = boot.index if boot.config.engines > 1 else None
    logs.configure(as_json=boot.log_json, engine=engine)
    logging.getLogger("roseinfer").setLevel(boot.log_level)  # other libraries' loggers stay as they are
    watch = (sys.stdin.fileno(), Path(boot.private))
    enable_stack_dumps(stacks_path(Path(boot.private), boot.index))
    threading.Thread(target=_exit_with_owner, args=watch, name="owner-watch", daemon=True).start()
    door = None if boot.door is None else socket.socket(fileno=boot.door)
    clients = ClientSockets(socket.socket(fileno=boot.listener), door)
    try:
        return _serve(boot, clients)
    finally:
        forsaken = _forsaken(clients, sys.stdin.fileno())
        clients.close(LAST_WORDS_S)
        if forsaken:
            shutil.rmtree(boot.private, ignore_errors=True)


def _serve(boot: EngineBoot, clients: ClientSockets) -> int:
    def start_failed(error: RoseinferError) -> None:
        clients.greet(StartFailed(type(error).__name__, str(error)))

    home = Home(Path(boot.private), boot.index, several=boot.config.engines > 1, tell=start_failed)
    try:
        board = None if boot.board is None else Board.open(Path(boot.board))
        with listening(LoggedStages()):
            core, info = build_engine(boot.config, Path(boot.folder), learnt=_learnt(boot), home=home)
    except RoseinferError as error:
        start_failed(error)
        return 1
    except Exception as error:
        log.exception("the engine failed to start")
        clients.greet(StartFailed("", f"{type(error).__name__}: {error}"[:500]))
        return 1
    clock = MonotonicClock()
    garbage = IdleGarbageCollector(clock)
    clients.greet(Ready(info))
    audit = IdleAudit(core.scheduler, clock) if boot.config.scheduler.idle_checks else None
    return 0 if EngineLoop(core, clients, clients, clock, garbage, audit, _publisher(boot, board, clients)).run() else 1


def _publisher(boot: EngineBoot, board: Board | None, clients: ClientSockets) -> Callable[[Promise], None] | None:
    """Whom the engine's promises are told: readers of the board, and clients that cannot be such."""
    if board is None:
        return None
    to_board: Callable[[Promise], None] = partial(board.publish, boot.index)
    if boot.door is None:
        return to_board

    def publish(promise: Promise) -> None:
        to_board(promise)
        clients.publish(promise)

    return publish


def _learnt(boot: EngineBoot) -> CostParams | None:
    """What a promise says of the cost of steps; what it does not say is learnt anew."""
    if boot.cost_s is None:
        return None
    step_s, token_s, row_s, context_s, expert_s = boot.cost_s
    return CostParams(step_s=step_s, token_s=token_s, row_s=row_s, context_s=context_s, expert_s=expert_s)


def _forsaken(clients: ClientSockets, stdin: int) -> bool:
    """Whether the owner is gone and with it whoever would remove its folder, which other engines may live in too."""
    if clients.owned:
        return False
    ends = select.poll()
    ends.register(stdin, select.POLLIN)
    return bool(ends.poll(FAREWELL_S * 1000))


def _exit_with_owner(stdin: int, private: Path) -> None:
    """The owner holds the other end of our standard input: when it closes without a word, the owner is gone.

    It cannot remove its folder `private` any more, so that is left to us. The loop notices the same at its socket,
    but not in the middle of a step that hangs.
    Reads the descriptor, not the file object, whose lock the interpreter could not take from this thread at exit.
    """
    while os.read(stdin, 1):
        pass
    shutil.rmtree(private, ignore_errors=True)
    time.sleep(EXIT_PATIENCE_S)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
