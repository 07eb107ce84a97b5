"""Constraints of requests: built and verified once in child processes, then cached."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Protocol, TypeVar

import msgspec

from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.guide import GuideSpec, Thinking
from roseinfer.grammar.build import check_size
from roseinfer.grammar.constraint import BuiltGrammar, Constraint
from roseinfer.grammar.limits import MAX_DEPTH, check_mask_time, too_complex
from roseinfer.grammar.prover import ProofRefused, ProofRequest, ProofResult, Prover, ProverBoot, ProverInterruptedError
from roseinfer.server.http.errors import unavailable
from roseinfer.text.tokenizer import Tokenizer

Result = TypeVar("Result")

DEFAULT_PROVERS = 2
MAX_WAITING = 64
# How long a constraint waits for an idle prover.
MAX_WAIT_S = 5.0
MAX_ENTRIES = 1024
MAX_CACHED_BYTES = 64 * 2**20
RETRY_S = 2.0


Proof = asyncio.Future[BuiltGrammar]


class GrammarObserver(Protocol):
    def compiled(self, seconds: float) -> None:
        """Note the time to build and verify, or reject, a constraint."""
        ...

    def cached(self) -> None:
        """Count a cached constraint."""
        ...

    def refused(self, code: str) -> None:
        """Count a rejected constraint."""
        ...


class Grammars:
    """Cache of verified constraints. Belongs to an event loop and never blocks it.

    Provers start with the first constraint, or with `warm_up`.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...], observer: GrammarObserver
    ) -> None:
        self._observer = observer
        self._vocabulary = (tokenizer, vocab_size, eos_ids)
        self._idle = [Prover(self._prover_boot) for _ in range(DEFAULT_PROVERS)]
        self._all = tuple(self._idle)
        self._threads = ThreadPoolExecutor(DEFAULT_PROVERS, thread_name_prefix="roseinfer-grammar")
        self.idle_provers = asyncio.Semaphore(DEFAULT_PROVERS)
        self._waiting = 0
        self._pending: dict[bytes, asyncio.Task[ProofResult]] = {}
        self._known: OrderedDict[bytes, ProofResult] = OrderedDict()
        self.cached_bytes = 0

    def begin(self, constraint: Constraint, param: str, leading_space: bool = False) -> Proof:
        """Start `prove` in the background. The caller need not await the result."""
        proof = asyncio.ensure_future(self.prove(constraint, param, leading_space))
        proof.add_done_callback(_retrieved)
        return proof

    async def guide(
        self,
        constraint: Constraint,
        param: str,
        thinking: Thinking | None = None,
        proof: Proof | None = None,
        n: int = 1,
    ) -> tuple[GuideSpec, list[str]]:
        """Return the guide for the engine, and warnings.

        `thinking`: reasoning before the constrained part. `proof`: from `begin`, with `leading_space` if the model
        reasons. `n`: samples that follow the constraint. Raises `InvalidRequestError` that names `param`, `ApiError`
        503 if too many wait.
        """
        made = await (proof or self.prove(constraint, param, leading_space=thinking is not None))
        try:
            check_mask_time(made.mask_s, n)
        except InvalidRequestError as error:
            raise self._refusal(error.message, error.code, param) from error
        spec = GuideSpec(
            grammar=made.grammar,
            triggers=made.triggers,
            ends_after=made.ends_after,
            thinking=thinking,
            memory=made.memory,
        )
        return spec, [f"{param}: {name} is not enforced" for name in made.warnings]

    async def prove(self, constraint: Constraint, param: str, leading_space: bool = False) -> BuiltGrammar:
        """Return the verified grammar. Raises what `guide` raises."""
        try:
            question = msgspec.msgpack.encode(ProofRequest(constraint, leading_space))
            check_size(constraint, len(question))
        except RecursionError:
            raise self._refusal(f"nested deeper than {MAX_DEPTH} levels", "grammar_too_complex", param) from None
        except InvalidRequestError as error:
            raise self._refusal(error.message, error.code, param) from error
        answer = await self._answer(question)
        if isinstance(answer, ProofRefused):
            raise self._refusal(answer.message, answer.code, param)
        return answer

    def warm_up(self) -> None:
        """Start a prover for the first constraint."""
        self._threads.submit(self._with_prover, Prover.start)

    def close(self) -> None:
        for prover in self._all:
            prover.end()
        self._threads.shutdown(cancel_futures=True)
        for prover in self._all:
            prover.close()

    async def _answer(self, question: bytes) -> ProofResult:
        key = sha256(question).digest()
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            self._observer.cached()
            return known
        task = self._pending.get(key)
        if task is None:
            task = self._pending[key] = asyncio.create_task(self._ask(key, question))
            task.add_done_callback(lambda task: self._forget(key, task))
        else:
            self._observer.cached()
        # Other requests may wait for the result, and it is cached even if this one leaves.
        return await asyncio.shield(task)

    async def _ask(self, key: bytes, question: bytes) -> ProofResult:
        await self._turn()
        try:
            started_s = time.perf_counter()
            loop = asyncio.get_running_loop()
            said = await loop.run_in_executor(self._threads, self._with_prover, lambda prover: prover.prove(question))
        except ProverInterruptedError:
            message = "The constraint was not compiled: its process was interrupted"
            raise unavailable("grammar_interrupted", message, RETRY_S) from None
        finally:
            self.idle_provers.release()
        self._observer.compiled(time.perf_counter() - started_s)
        if said is None:
            answer: ProofResult = ProofRefused("it takes too long or too much memory to compile", too_complex("").code)
        else:
            answer = msgspec.msgpack.decode(said, type=ProofResult)
        self._remember(key, answer)
        return answer

    def _forget(self, key: bytes, task: "asyncio.Task[ProofResult]") -> None:
        del self._pending[key]
        _retrieved(task)

    async def _turn(self) -> None:
        if self._waiting < MAX_WAITING:
            self._waiting += 1
            try:
                async with asyncio.timeout(MAX_WAIT_S):
                    await self.idle_provers.acquire()
                return
            except TimeoutError:
                pass
            finally:
                self._waiting -= 1
        message = "Too many grammars are being compiled"
        raise unavailable("grammar_queue_full", message, RETRY_S)

    def _with_prover(self, do: Callable[[Prover], Result]) -> Result:
        """Use the most recently used prover: it is warm, and others need not start."""
        prover = self._idle.pop()
        try:
            return do(prover)
        finally:
            self._idle.append(prover)

    def _remember(self, key: bytes, answer: ProofResult) -> None:
        """Cache an answer. Rejections too: the CPU time limit would reject them again."""
        self._known[key] = answer
        self.cached_bytes += _size(answer)
        while len(self._known) > MAX_ENTRIES or self.cached_bytes > MAX_CACHED_BYTES:
            _, old = self._known.popitem(last=False)
            self.cached_bytes -= _size(old)

    def _refusal(self, message: str, code: str | None, param: str) -> InvalidRequestError:
        self._observer.refused(code or "invalid")
        return InvalidRequestError(f"{param}: {message}", param, code)

    def _prover_boot(self) -> ProverBoot:
        tokenizer, vocab_size, eos_ids = self._vocabulary
        return ProverBoot(tokenizer.backend.to_str(), vocab_size, list(eos_ids))


def _size(answer: ProofResult) -> int:
    """Estimate the bytes of a cached answer."""
    return len(msgspec.msgpack.encode(answer))


def _retrieved(done: "asyncio.Future[Result]") -> None:
    """Retrieve the exception: no request may be waiting any more."""
    if not done.cancelled():
        done.exception()
