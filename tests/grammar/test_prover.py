"""The process that proves grammars: it answers, and what would never end ends it alone."""

import os
import signal
from collections.abc import Iterator

import msgspec
import pytest

from roseinfer.grammar.constraint import JSON_OBJECT, BuiltGrammar, Constraint, GrammarText, JsonSchema
from roseinfer.grammar.prover import ProofRefused, ProofRequest, ProofResult, Prover, ProverBoot, ProverInterruptedError
from tests.helpers.grammars import tiny_tokenizer

# Deciding whether any text follows all of these takes hours.
ENDLESS = JsonSchema(schema={"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(30)]})


def vocabulary() -> bytes:
    tokenizer = tiny_tokenizer()
    return msgspec.msgpack.encode(ProverBoot(tokenizer.backend.to_str(), tokenizer.vocab_size, [0], cpu_s=0.1))


@pytest.fixture
def prover() -> Iterator[Prover]:
    made = Prover(vocabulary)
    yield made
    made.close()


def ask(prover: Prover, constraint: Constraint) -> ProofResult | None:
    said = prover.prove(msgspec.msgpack.encode(ProofRequest(constraint)))
    return None if said is None else msgspec.msgpack.decode(said, type=ProofResult)


def test_it_answers(prover: Prover) -> None:
    assert isinstance(ask(prover, JSON_OBJECT), BuiltGrammar)
    assert ask(prover, JsonSchema(schema={"not": {}}, strict=True)) == ProofRefused(
        "the schema is strict, and not cannot be enforced", "unsupported_schema"
    )
    assert ask(prover, JsonSchema(schema={"not": {}})).warnings == ("not",)


def test_what_would_never_end_ends_it_and_the_next_one_answers(prover: Prover) -> None:
    assert ask(prover, JSON_OBJECT)
    first = prover._process.pid
    assert ask(prover, ENDLESS) is None
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert ask(prover, JSON_OBJECT)


def test_what_it_accepts_does_not_need_the_whole_stack_of_the_engines_threads(prover: Prover) -> None:
    """The library goes down the rules; beyond the stack it would take the engine along."""
    deep = "".join(f'r{i}: "a" r{i + 1} "b"\n' for i in range(1500)) + 'r1500: "x"\n'
    assert ask(prover, GrammarText(f"start: r0\n{deep}")) is None
    assert ask(prover, GrammarText('start: "a"')), "the next one answers"


def test_it_can_be_ended_while_it_works(prover: Prover) -> None:
    assert ask(prover, JSON_OBJECT)
    os.kill(prover._process.pid, signal.SIGSTOP)
    prover.end()
    with pytest.raises(ProverInterruptedError):
        ask(prover, JSON_OBJECT)
    assert prover._process is None


@pytest.mark.parametrize("cause", [signal.SIGKILL, signal.SIGALRM, signal.SIGTERM])
def test_what_the_machine_does_to_it_says_nothing_of_the_grammar(
    prover: Prover, cause: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's killer in want of memory, a clock that ran out on a machine that stood still, somebody's hand."""
    assert ask(prover, JSON_OBJECT)
    pid = prover._process.pid
    os.kill(pid, signal.SIGSTOP)
    receive = prover._receive

    def end() -> bytes:
        os.kill(pid, cause)
        os.kill(pid, signal.SIGCONT)
        return receive()

    monkeypatch.setattr(prover, "_receive", end)
    with pytest.raises(ProverInterruptedError):
        ask(prover, JSON_OBJECT)
    monkeypatch.undo()
    assert ask(prover, JSON_OBJECT), "the next one answers"


def test_a_vocabulary_that_grammars_cannot_be_matched_with() -> None:
    tokenizer = tiny_tokenizer()
    none = msgspec.msgpack.encode(ProverBoot(tokenizer.backend.to_str(), tokenizer.vocab_size, []))
    prover = Prover(lambda: none)
    answer = ask(prover, JSON_OBJECT)
    prover.close()
    assert isinstance(answer, ProofRefused) and answer.code == "unsupported_tokenizer"


def test_it_does_not_outlive_who_started_it(prover: Prover) -> None:
    assert ask(prover, JSON_OBJECT)
    process = prover._process
    process.stdin.close()
    assert process.wait(10) == 0
