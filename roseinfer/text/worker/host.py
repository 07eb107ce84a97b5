"""The process that text workers are forked from: `python -m roseinfer.text.worker.host DESCRIPTOR`.

It holds the tokenizer and the chat template, which its workers share with it. So a worker starts within milliseconds,
takes next to no memory of its own, and can be ended at any time. The host itself runs no request's data.

Commands come over the socket `DESCRIPTOR`: a letter and two numbers. `f`: fork a worker that serves the socket which
comes with it; `e`: end a worker; `a`: build the tokenizer's aliases. Each gets an answer: a letter and a number.
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
    TextHostReady,
    TextJobFailed,
    TextJobRefused,
    TextOrder,
    TooMuch,
    Unusable,
    framed,
    read_exactly,
    read_frame,
)
from roseinfer.text.worker.perform import TextPerformer

# Fork: memory in bytes, niceness. End: process id, nothing. Aliases: nothing.
COMMAND = struct.Struct("<cqi")
# Forked: process id, 0 = it cannot be. Ended: number of the signal that ended it. Aliases: nothing.
ANSWER = struct.Struct("<ci")
FORK, END, ALIASES = b"f", b"e", b"a"

_decode, _encode = msgspec.msgpack.Decoder(TextOrder).decode, msgspec.msgpack.Encoder().encode


class TextHostLoop:
    """Serves its owner until that is gone."""

    def __init__(self, owner: socket.socket) -> None:
        self._owner = owner
        self._workers: set[int] = set()

    def serve(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        """Runs until the owner closes its socket; the workers end too."""
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
        letter, first, second = COMMAND.unpack(data + read_exactly(self._owner, COMMAND.size - len(data)))
        answer = 0
        if letter == FORK:
            answer = self._fork(socket.socket(fileno=ends[0]), TextPerformer(tokenizer, template), first, second)
        elif letter == END:
            answer = self._end(first)
        elif template is not None:
            template.literal.build()
            _settle()
        self._owner.sendall(ANSWER.pack(letter, answer))

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
        """The number of the signal that has ended the worker; SIGKILL if it is only now that it ends."""
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
        limit_memory(memory_bytes)
        os.nice(niceness)
        # The server reports failed allocations and panics, so the library's own output is dropped.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        while True:
            answer = _encode(_answered(performer, read_frame(end)))
            signal.setitimer(signal.ITIMER_PROF, 0)
            end.sendall(framed(answer))
            del answer
    except (EOFError, ConnectionError):
        code = 0
    except MemoryError:  # as the library's own allocations fail
        os.abort()
    finally:
        os._exit(code)


def _answered(performer: TextPerformer, frame: bytes) -> Answer:
    """Whatever becomes of the order in the frame, the answer; a timer runs that ends this process."""
    try:
        order = _decode(frame)
        del frame
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
    # A supervisor may send it to all processes of a service. The server decides which jobs end, and when.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    owner = socket.socket(fileno=int(sys.argv[1]))
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(EOFError, ConnectionError):
        boot = msgspec.msgpack.decode(read_frame(owner), type=Boot)
        try:
            tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(boot.tokenizer), boot.config, boot.chat_template)
            source, template = boot.chat_template, None
            del boot
            _tell(owner, Loaded())
            if source is not None:
                template = ChatTemplate(compiled(source, tokenizer.special_tokens), tokenizer)
                template.literal.may_build = False
        except RoseinferError as error:
            _tell(owner, Unusable(str(error)))
            return
        variables = None if template is None else sorted(template.kwargs)
        _tell(owner, TextHostReady(variables, tokenizer.max_token_bytes))
        _settle()
        TextHostLoop(owner).serve(tokenizer, template)


def _settle() -> None:
    """Give memory back that the start took, and keep collections in workers from touching what they share."""
    gc.collect()
    gc.freeze()
    trim()


def _tell(owner: socket.socket, start: Start) -> None:
    owner.sendall(framed(msgspec.msgpack.encode(start)))


if __name__ == "__main__":
    main()
