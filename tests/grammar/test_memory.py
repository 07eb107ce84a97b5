"""Memory of grammars: the estimate against the allocator's own count, with a wide margin."""

import random
from array import array

import pytest

from roseinfer.grammar.build import build_grammar, prove_grammar
from roseinfer.grammar.constraint import Constraint, JsonSchema, Regex
from roseinfer.grammar.library import GrammarTokens, compile_grammar
from roseinfer.grammar.memory import GrammarMemory, estimate_memory, heap_bytes
from tests.helpers.cases import cases
from tests.helpers.grammars import tiny_tokenizer

MASKS = 200
MB = 2**20

TOKENIZER = tiny_tokenizer()
TOKENS = GrammarTokens.of(TOKENIZER, TOKENIZER.vocab_size, [0])


def an_object(properties: dict) -> JsonSchema:
    return JsonSchema(schema={"type": "object", "properties": properties, "required": list(properties)})


KINDS = {
    "literal": JsonSchema(schema={"enum": ["a" * 8000]}),
    "small": an_object({"name": {"type": "string"}, "age": {"type": "integer"}}),
    "bounded": an_object({f"p{i}": {"type": "string", "maxLength": 200} for i in range(10)}),
    "enums": an_object({f"p{i}": {"enum": [f"v{i}_{j}" for j in range(20)]} for i in range(100)}),
    "regex": Regex("(.{1,50}[ab]){1,50}"),
}


def taken(constraint: Constraint) -> int:
    """Return the bytes that a grammar takes after outputs of `MASKS` tokens."""
    text = build_grammar(constraint, {}).grammar
    words = memoryview(array("I", bytes(4 * -(-TOKENS.vocab_size // 32))))
    before = heap_bytes()
    grammar = compile_grammar(text, TOKENS)
    masks = 0
    rng = random.Random(0)
    while masks < MASKS:
        matcher = grammar.matcher()
        for _ in range(100):
            matcher.fill(words)
            masks += 1
            allowed = [32 * i + j for i, word in enumerate(words) if word for j in range(32) if word >> j & 1]
            allowed = [token for token in allowed if token not in TOKENS.eos_ids and token < TOKENS.vocab_size]
            if not allowed:
                break
            matcher.consume([rng.choice(allowed)])
            if matcher.halted:
                break
    del matcher
    return heap_bytes() - before


@pytest.mark.skipif(heap_bytes() is None, reason="this system's allocator reports no counts")
@cases("kind", ["small", "bounded", "regex"], exhaustive=["literal", "enums"])
def test_measured_and_estimated_memory_are_of_the_right_order(kind: str) -> None:
    constraint = KINDS[kind]
    taken(KINDS["small"])  # llguidance's own allocations
    real = taken(constraint)
    made = prove_grammar(build_grammar(constraint, {}), TOKENS)
    measured = GrammarMemory(*made.memory).after(MASKS)
    assert real / 3 < measured < 6 * real + MB / 4, f"{real} bytes taken, {measured} measured"
    if kind != "regex":  # whose states depend on more than the length of its text
        estimate = estimate_memory(made.grammar).after(MASKS)
        assert real / 3 < estimate < 10 * real + MB / 4, f"{real} bytes taken, {estimate} estimated"


def test_each_copy_of_a_grammar_grows() -> None:
    memory = GrammarMemory(1000, 100)
    assert memory.after(0) == 1000 and memory.after(0, lanes=3) == 3000
    assert memory.grown(48) == memory.grown(48, lanes=2) == 200
    assert memory.grown(4 * 200) == 2 * memory.grown(200)
