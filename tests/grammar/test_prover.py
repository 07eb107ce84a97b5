"""Prover process: its results, and grammars that exceed its limits. `tests/processes` tests launch and end."""

import os
import signal
import threading
from collections.abc import Iterator

import msgspec
import pytest

from roseinfer.grammar.constraint import JSON_OBJECT, BuiltGrammar, Constraint, GrammarText, JsonSchema
from roseinfer.grammar.prover import (
    MODULE,
    ProofRefused,
    ProofRequest,
    ProofResult,
    Prover,
    ProverBoot,
    ProverInterruptedError,
)
from roseinfer.processes.frames import frame, read_frame, write_all
from roseinfer.processes.launch import launch
from tests.helpers.grammars import tiny_tokenizer
from tests.helpers.process_table import children, command_line

# Deciding whether any text follows all of these takes hours.
ENDLESS = JsonSchema(schema={"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(30)]})


def boot() -> ProverBoot:
    tokenizer = tiny_tokenizer()
    return ProverBoot(tokenizer.backend.to_str(), tokenizer.vocab_size, [0], cpu_s=0.1)


@pytest.fixture
def prover() -> Iterator[Prover]:
    made = Prover(boot)
    yield made
    made.close()
    assert provers() == []


def provers() -> list[int]:
    """Return the prover processes of this process, zombies included."""
    return [child for child in children(os.getpid()) if MODULE in command_line(child)]


def ask(prover: Prover, constraint: Constraint) -> ProofResult | None:
    result = prover.prove(msgspec.msgpack.encode(ProofRequest(constraint)))
    return None if result is None else msgspec.msgpack.decode(result, type=ProofResult)


def test_grammars_are_proved_or_refused(prover: Prover) -> None:
    assert isinstance(ask(prover, JSON_OBJECT), BuiltGrammar)
    assert ask(prover, JsonSchema(schema={"not": {}}, strict=True)) == ProofRefused(
        "the schema is strict, and 'not' cannot be enforced", "unsupported_schema"
    )
    assert ask(prover, JsonSchema(schema={"not": {}})).warnings == ("not",)


def test_an_endless_grammar_ends_the_process_and_a_new_one_proves_the_next(prover: Prover) -> None:
    assert ask(prover, JSON_OBJECT)
    first = provers()
    assert ask(prover, ENDLESS) is None
    assert provers() == []
    assert ask(prover, JSON_OBJECT)
    assert len(provers()) == 1 and provers() != first


def test_grammars_that_need_a_deep_stack_are_refused(prover: Prover) -> None:
    """llguidance recurses over rules, and a stack overflow would end the engine."""
    deep = "".join(f'r{i}: "a" r{i + 1} "b"\n' for i in range(1500)) + 'r1500: "x"\n'
    assert ask(prover, GrammarText(f"start: r0\n{deep}")) is None
    assert ask(prover, GrammarText('start: "a"')), "a new process proves the next one"


def test_a_prover_can_be_ended_while_it_works(prover: Prover) -> None:
    assert ask(prover, JSON_OBJECT)
    (pid,) = provers()
    os.kill(pid, signal.SIGSTOP)
    ending = threading.Timer(0.1, prover.end)
    ending.start()
    with pytest.raises(ProverInterruptedError):
        ask(prover, JSON_OBJECT)
    assert provers() == []


@pytest.mark.parametrize("cause", [signal.SIGKILL, signal.SIGALRM, signal.SIGTERM])
def test_signals_from_outside_are_no_verdict_on_the_grammar(prover: Prover, cause: signal.Signals) -> None:
    """Such are the kernel's when memory runs out, that of the wall-clock limit, and an operator's."""
    assert ask(prover, JSON_OBJECT)
    (pid,) = provers()
    os.kill(pid, signal.SIGSTOP)

    def end() -> None:
        os.kill(pid, cause)
        os.kill(pid, signal.SIGCONT)

    ending = threading.Timer(0.5, end)  # the request has been sent by then, or a new process would get it
    ending.start()
    with pytest.raises(ProverInterruptedError):
        ask(prover, JSON_OBJECT)
    ending.join()
    assert ask(prover, JSON_OBJECT), "a new process proves the next one"


def test_a_tokenizer_without_end_tokens_is_unsupported() -> None:
    tokenizer = tiny_tokenizer()
    prover = Prover(lambda: ProverBoot(tokenizer.backend.to_str(), tokenizer.vocab_size, []))
    answer = ask(prover, JSON_OBJECT)
    prover.close()
    assert isinstance(answer, ProofRefused) and answer.code == "unsupported_tokenizer"


def test_a_prover_ends_with_its_standard_input() -> None:
    child = launch(MODULE, boot(), read_stdout=True)
    write_all(child.stdin, frame(msgspec.msgpack.encode(ProofRequest(JSON_OBJECT))))
    assert read_frame(child.stdout.read)
    child.close()
    assert child.wait_in_thread(30) == 0
