"""Constraints on their way to the engine: proved once, remembered, bounded, and never in the way of others."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.guide import Thinking
from roseinfer.grammar.constraint import JSON_OBJECT, Choice, JsonSchema, Regex
from roseinfer.server.http.errors import ApiError
from roseinfer.server.request import grammars as module
from roseinfer.server.request.grammars import Grammars
from tests.helpers.grammars import accepts, tiny_tokenizer


class Notes:
    def __init__(self) -> None:
        self.compilations = 0
        self.hits = 0
        self.refusals: list[str] = []

    def compiled(self, seconds: float) -> None:
        assert seconds > 0
        self.compilations += 1

    def cached(self) -> None:
        self.hits += 1

    def refused(self, code: str) -> None:
        self.refusals.append(code)


def run(work: Callable[[Grammars, Notes], Awaitable[Any]]) -> None:
    async def main() -> None:
        notes, tokenizer = Notes(), tiny_tokenizer()
        grammars = Grammars(tokenizer, tokenizer.vocab_size, (0,), notes)
        try:
            await work(grammars, notes)
        finally:
            grammars.close()

    asyncio.run(main())


def test_a_constraint_becomes_what_the_engine_gets_once() -> None:
    async def work(grammars: Grammars, notes: Notes) -> None:
        schema = JsonSchema(schema={"type": "array", "uniqueItems": True, "items": {"type": "integer"}})
        both = await asyncio.gather(*(grammars.guide(schema, "guided_json") for _ in range(2)))
        assert both[0] == both[1] == await grammars.guide(schema, "guided_json")
        spec, warnings = both[0]
        assert accepts(spec.grammar, "[1, 2]") and not spec.triggers and spec.thinking is None
        assert warnings == ["guided_json: uniqueItems is not enforced"]
        assert (notes.compilations, notes.hits, notes.refusals) == (1, 2, [])

    run(work)


def test_what_is_too_slow_for_so_many_samples_is_refused_and_for_fewer_is_not() -> None:
    async def work(grammars: Grammars, notes: Notes) -> None:
        slow = Choice(["a" * 8000])
        made = await grammars.prove(slow, "x")
        assert made.mask_s > 0
        many = int(1 / made.mask_s) + 1  # a second of masks for each token
        with pytest.raises(InvalidRequestError, match=f"x: the constraint is too slow: {many} samples take") as raised:
            await grammars.guide(slow, "x", n=many)
        assert (raised.value.param, raised.value.code) == ("x", "grammar_too_complex")
        assert (await grammars.guide(slow, "x", n=1))[0].grammar
        assert notes.compilations == 1 and notes.refusals == ["grammar_too_complex"]

    run(work)


def test_behind_thinking_white_space_may_come_first() -> None:
    async def work(grammars: Grammars, notes: Notes) -> None:
        thinking = Thinking(inside=True, begin=(), end=(1,))
        spec, _ = await grammars.guide(JSON_OBJECT, "response_format", thinking)
        assert spec.thinking is thinking and accepts(spec.grammar, "\n\n{}")
        spec, _ = await grammars.guide(JSON_OBJECT, "response_format")
        assert spec.thinking is None and not accepts(spec.grammar, "\n\n{}")

    run(work)


def test_a_proof_can_be_begun_before_it_is_asked_for() -> None:
    async def work(grammars: Grammars, notes: Notes) -> None:
        thinking = Thinking(inside=True, begin=(), end=(1,))
        proof = grammars.begin(JSON_OBJECT, "x", leading_space=True)
        spec, _ = await grammars.guide(JSON_OBJECT, "x", thinking, proof)
        assert spec == (await grammars.guide(JSON_OBJECT, "x", thinking))[0] and accepts(spec.grammar, "\n{}")
        assert (notes.compilations, notes.hits) == (1, 1)
        failing = grammars.begin(Regex("("), "x")
        with pytest.raises(InvalidRequestError, match="unclosed group"):
            await grammars.guide(Regex("("), "x", proof=failing)
        grammars.begin(Regex("(("), "x")  # nobody waits for it

    run(work)


def test_refusals_name_the_field_and_are_remembered() -> None:
    async def work(grammars: Grammars, notes: Notes) -> None:
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="unclosed group") as raised:
                await grammars.guide(Regex("("), "structured_outputs")
            assert (raised.value.param, raised.value.code) == ("structured_outputs", "invalid_grammar")
        assert (notes.compilations, notes.refusals) == (1, ["invalid_grammar"] * 2)

    run(work)


def test_what_is_too_large_is_refused_before_anybody_looks_at_it() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"not": deep}

    async def work(grammars: Grammars, notes: Notes) -> None:
        for constraint in (Choice(["a" * 300_000]), JsonSchema(schema=deep)):
            with pytest.raises(InvalidRequestError, match=r"larger than 262144 bytes|deeper than 100") as raised:
                await grammars.guide(constraint, "response_format")
            assert raised.value.code == "grammar_too_complex"
        assert notes.compilations == 0 and notes.refusals == ["grammar_too_complex"] * 2

    run(work)


def test_the_cache_is_bounded_by_entries_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES", 2)
    monkeypatch.setattr(module, "MAX_CACHED_BYTES", 2000)

    async def work(grammars: Grammars, notes: Notes) -> None:
        for choice in ("a", "b", "a", "c", "a", "b"):
            await grammars.guide(Choice([choice]), "x")
        assert (notes.compilations, notes.hits) == (4, 2)
        await grammars.guide(Choice(["x" * 1900]), "x")
        await grammars.guide(Choice(["b"]), "x")
        assert (notes.compilations, notes.hits) == (6, 2)
        assert 0 < grammars.cached_bytes < 2000

    run(work)


def test_what_took_too_long_is_forgotten_with_as_many_bytes_as_it_was_remembered_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES", 1)
    monkeypatch.setattr(module.Prover, "prove", lambda prover, question: None)

    async def work(grammars: Grammars, notes: Notes) -> None:
        kept = set()
        for choice in ("a", "b", "c"):
            with pytest.raises(InvalidRequestError):
                await grammars.guide(Choice([choice]), "x")
            kept.add(grammars.cached_bytes)
        assert len(kept) == 1 and kept.pop() > 0

    run(work)


def test_what_only_the_machine_kept_from_an_answer_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    ask, failures = module.Prover.prove, [module.ProverInterruptedError(), module.ProverInterruptedError()]

    def failing(prover: module.Prover, question: bytes) -> bytes | None:
        if failures:
            raise failures.pop()
        return ask(prover, question)

    monkeypatch.setattr(module.Prover, "prove", failing)

    async def work(grammars: Grammars, notes: Notes) -> None:
        for _ in range(2):
            with pytest.raises(ApiError) as raised:
                await grammars.guide(JSON_OBJECT, "x")
            assert (raised.value.status, raised.value.code) == (503, "grammar_interrupted")
            assert raised.value.retry_after_s
        await grammars.guide(JSON_OBJECT, "x")
        assert notes.refusals == []

    run(work)


def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 1)
    monkeypatch.setattr(module, "MAX_WAIT_S", 0.01)

    async def work(grammars: Grammars, notes: Notes) -> None:
        await grammars.guide(Choice(["known"]), "x")
        for _ in range(module.DEFAULT_PROVERS):
            await grammars.idle_provers.acquire()
        asked = [asyncio.create_task(grammars.guide(Choice([name]), "x")) for name in "ab"]
        await asyncio.wait(asked)
        for task in asked:
            error = task.exception()
            assert isinstance(error, ApiError)
            assert (error.status, error.code) == (503, "grammar_queue_full")
        await grammars.guide(Choice(["known"]), "x")
        grammars.idle_provers.release()
        await grammars.guide(Choice(["a"]), "x")

    run(work)


def test_who_leaves_does_not_take_the_grammar_along() -> None:
    async def work(grammars: Grammars, notes: Notes) -> None:
        leaving = asyncio.create_task(grammars.guide(JSON_OBJECT, "x"))
        await asyncio.sleep(0)
        leaving.cancel()
        await grammars.guide(JSON_OBJECT, "x")
        assert (notes.compilations, notes.hits) == (1, 1)

    run(work)
