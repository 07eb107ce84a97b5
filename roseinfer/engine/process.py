"""The engine process, and the one place where scheduler and runner meet."""

import logging
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import zmq

from roseinfer.core.clock import MonotonicClock
from roseinfer.core.config import EngineConfig
from roseinfer.core.errors import RoseinferError
from roseinfer.engine.api import EngineInfo
from roseinfer.engine.core import EngineCore, Runner
from roseinfer.engine.loop import EngineLoop
from roseinfer.engine.messages import ClientMessage, EngineMessage, Ready, Rejected, StartFailed
from roseinfer.engine.transport import EngineBoot
from roseinfer.kv.manager import KvManager
from roseinfer.openmp import calm_openmp
from roseinfer.sched.policies import make_policy
from roseinfer.sched.scheduler import Scheduler

log = logging.getLogger("roseinfer.engine")

EXIT_PATIENCE_S = 5.0


def build_engine(config: EngineConfig, folder: Path) -> tuple[EngineCore, EngineInfo]:
    """Load the model in `folder` and put an engine core around it. Raises typed errors for what the user can mend."""
    calm_openmp()
    from roseinfer.runner.build import build_runner
    from roseinfer.runner.threaded import ThreadedRunner

    started = time.monotonic()
    built = build_runner(config, folder)
    facts = built.facts
    overlap = config.scheduler.overlap
    if overlap is None:
        overlap = facts.device.startswith("cuda")
    runner: Runner = built.runner
    if overlap and facts.device == "cpu":
        runner = ThreadedRunner(built.runner)
    kv = KvManager(facts.num_blocks, config.cache.block_size, prefix_caching=config.cache.enable_prefix_caching)
    scheduler = Scheduler(config.scheduler, kv, make_policy(config.scheduler), facts.max_model_len)
    core = EngineCore(
        scheduler,
        runner,
        MonotonicClock(),
        depth=2 if overlap else 1,
        eos_ids=facts.eos_token_ids,
        vocab_size=facts.vocab_size,
        seed=config.model.seed,
    )
    info = EngineInfo(
        model=config.model.model,
        model_type=facts.model_type,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        block_size=config.cache.block_size,
        num_blocks=facts.num_blocks,
        max_num_seqs=config.scheduler.max_num_seqs,
        dtype=facts.dtype,
        device=facts.device,
        eos_token_ids=facts.eos_token_ids,
        default_sampling=dict(facts.default_sampling),
        startup_s={**facts.startup_s, "engine": time.monotonic() - started},
    )
    return core, info


class SocketInbox:
    def __init__(self, socket: zmq.Socket) -> None:
        self._socket = socket
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._decode = msgspec.msgpack.Decoder(ClientMessage).decode

    def receive(self, timeout_s: float) -> list[ClientMessage | Rejected]:
        messages: list[ClientMessage | Rejected] = []
        if timeout_s > 0 and not self._poller.poll(int(timeout_s * 1000)):
            return messages
        try:
            while True:
                messages.append(self._read(self._socket.recv(zmq.NOBLOCK)))
        except zmq.Again:
            return messages

    def _read(self, data: bytes) -> ClientMessage | Rejected:
        try:
            return self._decode(data)
        except msgspec.ValidationError as error:
            kind, name, *_ = msgspec.msgpack.decode(data)
            if kind != "add" or not isinstance(name, str):
                raise
            return Rejected(name, f"the request cannot be read: {error}", None, None)


class SocketOutbox:
    def __init__(self, socket: zmq.Socket) -> None:
        self._socket = socket
        self._encode = msgspec.msgpack.Encoder().encode

    def send(self, message: EngineMessage) -> None:
        self._socket.send(self._encode(message))


def main() -> int:
    """Serve one client: read an `EngineBoot` line from standard input, run until told to stop or left alone."""
    # Terminals and service managers send these to the whole group; the client decides what they mean.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    boot = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineBoot)
    logging.basicConfig(level=boot.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    watch = (sys.stdin.fileno(), Path(boot.private))
    threading.Thread(target=_exit_with_client, args=watch, name="client-watch", daemon=True).start()
    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket, address in ((pull, boot.inbox), (push, boot.outbox)):
        socket.set_hwm(0)
        socket.connect(address)
    push.setsockopt(zmq.LINGER, int(EXIT_PATIENCE_S * 1000))
    outbox = SocketOutbox(push)
    try:
        return _serve(boot, SocketInbox(pull), outbox)
    finally:
        pull.close(0)
        push.close()
        context.term()


def _serve(boot: EngineBoot, inbox: SocketInbox, outbox: SocketOutbox) -> int:
    try:
        core, info = build_engine(boot.config, Path(boot.folder))
    except RoseinferError as error:
        outbox.send(StartFailed(type(error).__name__, str(error)))
        return 1
    except Exception as error:
        log.exception("the engine failed to start")
        outbox.send(StartFailed("", f"{type(error).__name__}: {error}"[:500]))
        return 1
    outbox.send(Ready(info))
    return 0 if EngineLoop(core, inbox, outbox, MonotonicClock()).run() else 1


def _exit_with_client(stdin: int, private: Path) -> None:
    """The client holds the other end of our standard input: when it closes without a word, the client is gone.

    It cannot remove its folder `private` any more, so that is left to us.
    Reads the descriptor, not the file object, whose lock the interpreter could not take from this thread at exit.
    """
    while os.read(stdin, 1):
        pass
    time.sleep(EXIT_PATIENCE_S)
    shutil.rmtree(private, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
