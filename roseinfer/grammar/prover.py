"""Prover process, which builds and proves grammars: `python -m roseinfer.grammar.prover`.

Compiling some grammars of a few hundred bytes would take hours, and a thread cannot be stopped. So the system kills a
prover process that exceeds its limits on time, memory or stack, and the next request starts a new one.

After its boot struct it reads a `ProofRequest` for each `ProofResult` that it writes: frames of msgpack on its standard
input and output.
"""

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import IO

import msgspec
import tokenizers

from roseinfer.core.errors import InvalidRequestError, RoseinferError
from roseinfer.grammar.build import build_grammar, prove_grammar
from roseinfer.grammar.constraint import BuiltGrammar, Constraint
from roseinfer.grammar.library import GrammarTokens
from roseinfer.processes.child import read_boot, take_stdout
from roseinfer.processes.frames import frame, read_frame, write_all
from roseinfer.processes.launch import ChildProcess, launch
from roseinfer.text.tokenizer import Tokenizer

# Limits for one grammar: processor time, and wall-clock time on a busy machine.
COMPILE_CPU_S = 2.0
COMPILE_WALL_S = 8.0
MEMORY_BYTES = 4 * 2**30
# llguidance recurses as deep as the grammar. The engine's threads have at least twice this stack, so a proved grammar
# cannot overflow it.
STACK_BYTES = 2**20
MODULE = "roseinfer.grammar.prover"
REAP_TIMEOUT_S = 1.0  # from the end of the process's pipes until its exit code is known


class ProverBoot(msgspec.Struct):
    """Boot struct of a prover: the text of tokenizer.json, the size of the model's vocabulary, and the end tokens.

    `cpu_s`: limit on the processor time for one grammar.
    """

    tokenizer: str
    vocab_size: int
    eos_ids: list[int]
    cpu_s: float = COMPILE_CPU_S


class ProofRequest(msgspec.Struct):
    constraint: Constraint
    leading_space: bool = False


class ProofRefused(msgspec.Struct, tag="refused"):
    """Fields of `InvalidRequestError`."""

    message: str
    code: str | None


ProofResult = BuiltGrammar | ProofRefused

# Signals for causes outside the grammar. The grammar causes the others: SIGPROF by its processor time, SIGSEGV by its
# stack, SIGABRT by its memory.
_UNRELATED_SIGNALS = frozenset(map(signal.Signals, (signal.SIGALRM, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)))


class ProverInterruptedError(RoseinferError):
    """The prover ended for a reason unrelated to the grammar, which may be proved later."""

    def __init__(self) -> None:
        super().__init__("the process that compiles constraints was interrupted")


class Prover:
    """Client of one prover process, which starts with the first request. Blocks; for one thread at a time."""

    def __init__(self, make_boot: Callable[[], ProverBoot]) -> None:
        self._make_boot = make_boot
        self._child: ChildProcess | None = None
        self._ended = False

    def start(self) -> None:
        if self._ended:
            raise EOFError
        if self._child is not None:
            if self._child.exit_code is None:
                return
            self._child.close()
        # In a session of its own, as Ctrl-C is for the server.
        self._child = launch(MODULE, self._make_boot(), new_session=True, read_stdout=True)

    def prove(self, request: bytes) -> bytes | None:
        """Return the encoded `ProofResult` of an encoded `ProofRequest`, None if the grammar exceeds a limit.

        Raises `ProverInterruptedError`. Without a result the process has ended.
        """
        try:
            self.start()
            assert self._child is not None
            write_all(self._child.stdin, frame(request))
            return self._receive(self._child)
        except (BrokenPipeError, EOFError):
            if self._reap() in _UNRELATED_SIGNALS:
                raise ProverInterruptedError from None
            return None
        except TimeoutError:
            self._reap()
            raise ProverInterruptedError from None

    def end(self) -> None:
        """Kill the process, from any thread. Pending and later calls of `prove` fail."""
        self._ended = True
        child = self._child
        if child is not None:
            child.kill()

    def close(self) -> None:
        """Release the process. No other thread may be in `prove`."""
        self._ended = True
        self._reap()

    def _reap(self) -> int | None:
        """Return the signal that ended the process, 0 for none. A process that still runs is killed."""
        child, self._child = self._child, None
        if child is None:
            return signal.SIGKILL
        code = child.stop_in_thread(0 if self._ended else REAP_TIMEOUT_S)
        child.close()
        return max(-code, 0)

    def _receive(self, child: ChildProcess) -> bytes:
        poll = select.poll()
        poll.register(child.stdout, select.POLLIN)
        # The process ends itself long before, unless the whole machine was stopped.
        if not poll.poll(1000 * 4 * COMPILE_WALL_S):
            raise TimeoutError
        return read_frame(child.stdout.read)


# --- in the process ---------------------------------------------------------------------------------------------
class ProofServer:
    """Proofs with the vocabulary of one model."""

    def __init__(self, boot: ProverBoot) -> None:
        backend = tokenizers.Tokenizer.from_str(boot.tokenizer)
        self._markers = {token.content: id for id, token in backend.get_added_tokens_decoder().items()}
        self._tokens: GrammarTokens | None = None
        self._error: InvalidRequestError | None = None
        try:
            self._tokens = GrammarTokens.of(Tokenizer(backend, {}, None), boot.vocab_size, boot.eos_ids)
        except InvalidRequestError as error:
            self._error = error

    def prove(self, request: ProofRequest) -> ProofResult:
        try:
            if self._tokens is None:
                assert self._error is not None
                raise self._error
            return prove_grammar(build_grammar(request.constraint, self._markers, request.leading_space), self._tokens)
        except InvalidRequestError as error:
            return ProofRefused(error.message, error.code)


def main() -> None:
    """Prove grammars until standard input ends."""
    results = os.fdopen(take_stdout(), "wb", 0)
    with contextlib.suppress(ImportError, OSError, ValueError):  # not every system has these limits
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=_serve, args=(read_boot(ProverBoot), results))
    worker.start()
    worker.join()


def _serve(boot: ProverBoot, results: IO[bytes]) -> None:
    with contextlib.suppress(EOFError, BrokenPipeError):
        server = ProofServer(boot)
        while True:
            message = read_frame(sys.stdin.buffer.read)
            with _limited(boot.cpu_s):
                result = server.prove(msgspec.msgpack.decode(message, type=ProofRequest))
            write_all(results, frame(msgspec.msgpack.encode(result)))


@contextlib.contextmanager
def _limited(cpu_s: float) -> Iterator[None]:
    """Have the system kill this process if the block exceeds its time limits."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, COMPILE_WALL_S)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
