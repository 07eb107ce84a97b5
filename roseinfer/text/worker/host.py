"""Process from which text workers are forked: `python -m roseinfer.text.worker.host DESCRIPTOR`.

The host holds the tokenizer and the chat template, which its workers share. So a worker starts within milliseconds,
takes next to no memory of its own, and can be killed at any time. The host itself processes no data of requests.

Commands come over the socket `DESCRIPTOR`: a letter and two numbers. `f`: fork a worker that serves the socket which
comes with the command; `e`: end a worker; `a`: build the tokenizer's aliases. Each gets a frame: a letter and a number.
"""

import contextlib
import gc
import os
import signal
import socket
import struct
import sys
from typing import NoReturn

import msgspec
import tokenizers

from roseinfer.core.errors import (
    InvalidRequestError,
    RequestTooLongError,
    RoseinferError,
    TokenizerFailedError,
)
from roseinfer.processes.child import die_with_parent_thread, ignore_terminal_signals
from roseinfer.processes.frames import frame, read_exactly, read_frame
from roseinfer.text.chat import AliasesNeededError, ChatTemplate
from roseinfer.text.template_check import compiled, limit_memory
from roseinfer.text.tokenizer import Tokenizer, is_panic
from roseinfer.text.worker.memory import trim
from roseinfer.text.worker.messages import (
    AliasesNeeded,
    Answer,
    Boot,
    Loaded,
    Start,
    TextFacts,
    TextJobFailed,
    TextJobRefused,
    TextOrder,
    TooMuch,
    Unusable,
)
from roseinfer.text.worker.perform import TextPerformer

# Fork: memory in bytes, niceness. End: process id, nothing. Aliases: nothing.
COMMAND = struct.Struct("<cqi")
# Forked: process id, 0 = fork failed. Ended: number of the signal that ended it. Aliases: nothing.
ANSWER = struct.Struct("<ci")
FORK, END, ALIASES = b"f", b"e", b"a"

_decode, _encode = msgspec.msgpack.Decoder(TextOrder).decode, msgspec.msgpack.Encoder().encode


class TextHostLoop:
    """Loop over the owner's commands, which ends with the owner."""

    def __init__(self, owner: socket.socket) -> None:
        self._owner = owner
        self._workers: set[int] = set()

    def serve(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        """Obey commands until the owner closes its socket, then end the workers."""
        try:
            with contextlib.suppress(EOFError, ConnectionError):
                while True:
                    self._obey(tokenizer, template)
        finally:
            for worker in list(self._workers):
                self._end(worker)

    def _obey(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        data, ends, _, _ = socket.recv_fds(self._owner, COMMAND.size, 1)
        if not data:
            raise EOFError
        letter, first, second = COMMAND.unpack(data + read_exactly(self._owner.recv, COMMAND.size - len(data)))
        answer = 0
        if letter == FORK:
            answer = self._fork(socket.socket(fileno=ends[0]), TextPerformer(tokenizer, template), first, second)
        elif letter == END:
            answer = self._end(first)
        elif template is not None:
            template.literal.build()
            _settle()
        self._owner.sendall(frame(ANSWER.pack(letter, answer)))

    def _fork(self, end: socket.socket, performer: TextPerformer, memory_bytes: int, niceness: int) -> int:
        try:
            worker = os.fork()
        except OSError:  # too many processes, or too little memory
            end.close()
            return 0
        if not worker:
            self._owner.close()
            _work(end, performer, memory_bytes, niceness)
        end.close()
        self._workers.add(worker)
        return worker

    def _end(self, worker: int) -> int:
        """Kill a worker unless it has ended. Return the number of the signal that ended it, 0 for none."""
        if worker not in self._workers:
            return signal.SIGKILL
        self._workers.discard(worker)
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
        _, status = os.waitpid(worker, 0)
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


# --- a worker -------------------------------------------------------------------------------------------------------
def _work(end: socket.socket, performer: TextPerformer, memory_bytes: int, niceness: int) -> NoReturn:
    code = 1
    try:
        die_with_parent_thread()  # a job that takes long does not see its channel closed
        limit_memory(memory_bytes)
        os.nice(niceness)
        # The server reports failed allocations and panics, so the library's own output is dropped.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        while True:
            answer = _encode(_answer(performer, read_frame(end.recv)))
            signal.setitimer(signal.ITIMER_PROF, 0)
            end.sendall(frame(answer))
            del answer
    except (EOFError, ConnectionError):
        code = 0
    except MemoryError:  # as if an allocation of the library had failed
        os.abort()
    finally:
        os._exit(code)


def _answer(performer: TextPerformer, message: bytes) -> Answer:
    """Perform an encoded order and return the answer, also for errors. Leaves a timer that kills this process."""
    try:
        order = _decode(message)
        del message
        signal.setitimer(signal.ITIMER_PROF, order.cpu_s)
        return performer.perform(order.job)
    except InvalidRequestError as error:
        too_long = None
        if isinstance(error, RequestTooLongError):
            too_long = (error.max_model_len, error.prompt_tokens)
        return TextJobRefused(error.message, error.param, error.code, too_long)
    except AliasesNeededError:
        return AliasesNeeded()
    except MemoryError:
        return TooMuch()
    except TokenizerFailedError as error:
        return TextJobFailed(str(error))
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        return TextJobFailed(f"{type(error).__name__}: {error}"[:500])


# --- the start ------------------------------------------------------------------------------------------------------
def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads do not survive a fork
    ignore_terminal_signals()
    owner = socket.socket(fileno=int(sys.argv[1]))
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(EOFError, ConnectionError):
        boot = msgspec.msgpack.decode(read_frame(owner.recv), type=Boot)
        try:
            tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(boot.tokenizer), boot.config, boot.chat_template)
            source, template = boot.chat_template, None
            del boot
            _send(owner, Loaded())
            if source is not None:
                template = ChatTemplate(compiled(source, tokenizer.special_tokens), tokenizer)
                template.literal.may_build = False
        except RoseinferError as error:
            _send(owner, Unusable(str(error)))
            return
        variables = None if template is None else template.kwargs
        _send(owner, TextFacts(variables, tokenizer.max_token_bytes))
        _settle()
        TextHostLoop(owner).serve(tokenizer, template)


def _settle() -> None:
    """Free memory of the start, and exclude shared objects from garbage collection in workers."""
    gc.collect()
    gc.freeze()
    trim()


def _send(owner: socket.socket, start: Start) -> None:
    owner.sendall(frame(msgspec.msgpack.encode(start)))


if __name__ == "__main__":
    main()
