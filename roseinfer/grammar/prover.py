"""A process that builds grammars and proves them: `python -m roseinfer.grammar.prover`.

Some grammars of a few hundred bytes would be compiled for hours, and a thread cannot be stopped. A process can: the
system ends one that takes too long, too much memory or too much stack, and the next question finds a new one.

Both ways go frames: the length of a message in 4 bytes, little end first, then msgpack. First comes `Vocabulary`, then
questions, each with an answer.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO

import msgspec
import tokenizers

from roseinfer.core.errors import InvalidRequestError, RoseinferError
from roseinfer.grammar.build import built, proved
from roseinfer.grammar.constraint import BuiltGrammar, Constraint
from roseinfer.grammar.library import GrammarTokens
from roseinfer.text.tokenizer import Tokenizer

# Processor time for one grammar, and time by the clock on a machine that has no processor to spare.
COMPILE_CPU_S = 2.0
COMPILE_WALL_S = 8.0
MEMORY_BYTES = 4 * 2**30
# The library's recursion is as deep as the grammar. The engine's threads have twice as much, wherever it runs: what is
# proved within this does not end the engine.
STACK_BYTES = 2**20
HEADER_BYTES = 4
GONE_S = 1.0  # from when the process has closed its pipes until the system knows what has ended it


class Vocabulary(msgspec.Struct):
    """What `GrammarTokens` needs: tokenizer.json, the model's vocabulary, the tokens that end an output. `cpu_s`:
    processor time for one grammar.
    """

    tokenizer: str
    vocab_size: int
    eos_ids: list[int]
    cpu_s: float = COMPILE_CPU_S


class Question(msgspec.Struct):
    constraint: Constraint
    leading_space: bool = False


class Refused(msgspec.Struct, tag="refused"):
    """Fields of `InvalidRequestError`."""

    message: str
    code: str | None


Answer = BuiltGrammar | Refused

# Signals that end the process for what the machine does, or whoever runs it. All others are for what the grammar does:
# its processor time (SIGPROF), its stack (SIGSEGV), its memory (SIGABRT).
_FOREIGN = frozenset(map(signal.Signals, (signal.SIGALRM, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)))


class Interrupted(RoseinferError):
    """There is no answer, for a reason that says nothing of the grammar: another time there may be one."""

    def __init__(self) -> None:
        super().__init__("the process that compiles constraints was interrupted")


class Prover:
    """Its side of the process, which starts with the first question. Blocks; for one thread at a time."""

    def __init__(self, vocabulary: Callable[[], bytes]) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False

    def start(self) -> None:
        if self._ended:
            raise EOFError
        if self._process is not None and self._process.poll() is None:
            return
        command = [sys.executable, "-m", "roseinfer.grammar.prover"]
        # A session of its own: Ctrl-C is the server's.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        self._send(self._vocabulary())

    def ask(self, question: bytes) -> bytes | None:
        """The answer, or None if the grammar takes too long, or more memory or stack than it may. Both are encoded.

        Raises `Interrupted`. Where there is no answer, the process is gone.
        """
        try:
            self.start()
            self._send(question)
            return self._receive()
        except (BrokenPipeError, EOFError):
            if self._reap() in _FOREIGN:
                raise Interrupted from None
            return None
        except TimeoutError:
            self._reap()
            raise Interrupted from None

    def end(self) -> None:
        """From any thread: whoever waits for an answer gets none, now and later."""
        self._ended = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Nobody waits any more."""
        self._ended = True
        self._reap()

    def _reap(self) -> int | None:
        """The number of the signal that ended the process, SIGKILL if it is only now that it ends, 0 for none."""
        process, self._process = self._process, None
        if process is None:
            return signal.SIGKILL
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0 if self._ended else GONE_S)
        process.kill()
        status = process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        return max(-status, 0)

    def _send(self, message: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        write(self._process.stdin, message)

    def _receive(self) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        pipe = self._process.stdout
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        # The process ends itself long before, unless the machine has stood still.
        until_s = time.monotonic() + 4 * COMPILE_WALL_S
        if not poll.poll(1000 * (until_s - time.monotonic())):
            raise TimeoutError
        return read(pipe)


def write(pipe: IO[bytes], message: bytes) -> None:
    data = memoryview(len(message).to_bytes(HEADER_BYTES, "little") + message)
    while data:
        data = data[pipe.write(data) :]


def read(pipe: IO[bytes]) -> bytes:
    """Raises `EOFError` if the other side is gone."""
    return _exactly(pipe, int.from_bytes(_exactly(pipe, HEADER_BYTES), "little"))


def _exactly(pipe: IO[bytes], count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = pipe.read(count - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


# --- within the process -----------------------------------------------------------------------------------------
class Answerer:
    """Answers questions about one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        backend = tokenizers.Tokenizer.from_str(vocabulary.tokenizer)
        self._markers = {token.content: id for id, token in backend.get_added_tokens_decoder().items()}
        self._tokens: GrammarTokens | None = None
        self._why: InvalidRequestError | None = None
        try:
            tokenizer = Tokenizer(backend, {}, None)
            self._tokens = GrammarTokens.of(tokenizer, vocabulary.vocab_size, vocabulary.eos_ids)
        except InvalidRequestError as error:
            self._why = error

    def answer(self, question: Question) -> Answer:
        try:
            if self._tokens is None:
                assert self._why is not None
                raise self._why
            return proved(built(question.constraint, self._markers, question.leading_space), self._tokens)
        except InvalidRequestError as error:
            return Refused(error.message, error.code)


def main() -> None:
    """Until nobody asks any more. Takes the standard streams, so that nothing else is written to them."""
    questions, answers = os.fdopen(os.dup(0), "rb", 0), os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)
    with contextlib.suppress(ImportError, OSError, ValueError):  # not every system has these limits
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=_answer_all, args=(questions, answers))
    worker.start()
    worker.join()


def _answer_all(questions: IO[bytes], answers: IO[bytes]) -> None:
    with contextlib.suppress(EOFError, BrokenPipeError):
        vocabulary = msgspec.msgpack.decode(read(questions), type=Vocabulary)
        answerer = Answerer(vocabulary)
        while True:
            message = read(questions)
            with _limited(vocabulary.cpu_s):
                answer = answerer.answer(msgspec.msgpack.decode(message, type=Question))
            write(answers, msgspec.msgpack.encode(answer))


@contextlib.contextmanager
def _limited(cpu_s: float) -> Iterator[None]:
    """The system ends this process if what is within takes too long."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, COMPILE_WALL_S)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
