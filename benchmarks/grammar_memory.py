"""Memory of the compiled grammars that an engine caches, compared with its estimate.

    python -m benchmarks.grammar_memory [--only KIND ...] [--outputs 2] [--tokens 100]

Each kind of grammar gets a process of its own. Many of that kind are compiled one after the other, and a few random
outputs follow each. The table has the maxima of the estimate, of the allocations (by glibc's count) and of the growth
of the process. No model runs; the vocabulary is that of the embedded model.
"""

import argparse
import multiprocessing
import random
from array import array
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from roseinfer.bench.report import header, table
from roseinfer.config.hub import load_tokenizer
from roseinfer.core.config.engine import ModelConfig
from roseinfer.engine.guided.grammar_cache import GrammarCache
from roseinfer.grammar.build import build_grammar, prove_grammar
from roseinfer.grammar.constraint import Choice, Constraint, GrammarText, JsonSchema, Regex
from roseinfer.grammar.library import Grammar, GrammarTokens, MatcherError
from roseinfer.grammar.memory import heap_bytes

MB = 2**20


def an_object(properties: dict[str, Any]) -> JsonSchema:
    return JsonSchema(schema={"type": "object", "properties": properties, "required": list(properties)})


def small(i: int) -> Constraint:
    tags = {"type": "array", "items": {"type": "string"}}
    return an_object({f"name{i}": {"type": "string"}, f"age{i}": {"type": "integer"}, "tags": tags})


def bounded(i: int) -> Constraint:
    return an_object({f"p{j}_{i}": {"type": "string", "maxLength": 200} for j in range(10)})


def patterns(i: int) -> Constraint:
    pattern = f"^([a-z]{{1,{20 + i % 250}}}-){{1,10}}[0-9]{{3}}$"
    return an_object({f"p{j}": {"type": "string", "pattern": pattern} for j in range(3)})


def many_enums(i: int) -> Constraint:
    return an_object({f"prop{j}": {"enum": [f"value{i}_{j}_{k}" for k in range(20)]} for j in range(100)})


def choices(i: int) -> Constraint:
    return Choice([f"{i} some longer label of text {j} " * 3 for j in range(500)])


def rules(i: int) -> Constraint:
    lines = [f'r_{k}: "x{i}" r_{k + 1} | "y" r_{k + 1} r_{k + 1}' for k in range(20)]
    return GrammarText("\n".join(["start: r_0", *lines, 'r_20: "a"']))


KINDS: dict[str, tuple[int, Any]] = {
    "small schemas": (1500, small),
    "an enum of 8 kB": (240, lambda i: JsonSchema(schema={"enum": [chr(97 + i % 26) * 8000 + str(i)]})),
    "4 x 8 kB in an enum": (60, lambda i: JsonSchema(schema={"enum": [f"{j}{i}" + "ab" * 4000 for j in range(4)]})),
    "10 texts of bounded length": (300, bounded),
    "3 patterns": (300, patterns),
    "2,000 short enum values": (100, many_enums),
    "500 choices": (100, choices),
    "20 rules in Lark": (300, rules),
    "a regex without end of states": (30, lambda i: Regex(f"(.{{1,{40 + i}}}[ab]){{1,50}}")),
}


def write(grammar: Grammar, vocab_size: int, eos_ids: tuple[int, ...], count: int, seed: int) -> None:
    """Have one output follow the grammar, drawing uniformly from the allowed tokens."""
    words = memoryview(array("I", bytes(4 * -(-vocab_size // 32))))
    matcher, rng = grammar.matcher(), random.Random(seed)
    try:
        for _ in range(count):
            matcher.fill(words)
            allowed = [32 * i + j for i, word in enumerate(words) if word for j in range(32) if word >> j & 1]
            allowed = [token for token in allowed if token < vocab_size and token not in eos_ids]
            if not allowed or matcher.halted:
                return
            matcher.consume([rng.choice(allowed)])
    except MatcherError:
        return


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def measure(kind: str, outputs: int, tokens: int, pipe: Connection) -> None:
    tokenizer = load_tokenizer(ModelConfig(model="tiny"))
    vocabulary = GrammarTokens.of(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id or 0])
    shelf = GrammarCache(lambda: vocabulary)
    shelf.tokens.result()
    prove_grammar(build_grammar(JsonSchema(schema={"type": "object"}), {}), vocabulary)  # llguidance's own allocations
    heap_before, resident_before = heap_bytes() or 0, resident_bytes()
    count, make = KINDS[kind]
    most = {"reckoned MB": 0.0, "allocated MB": 0.0, "resident MB": 0.0}
    for i in range(count):
        constraint = make(i)
        made = build_grammar(constraint, {})
        memory = prove_grammar(made, vocabulary).memory
        grammar = shelf.grammar(made.grammar, memory).result()
        for seed in range(outputs):
            write(grammar, vocabulary.vocab_size, vocabulary.eos_ids, tokens, seed)
        del grammar
        now = (shelf.taken_bytes, (heap_bytes() or 0) - heap_before, resident_bytes() - resident_before)
        most = {name: max(value, figure / MB) for (name, value), figure in zip(most.items(), now, strict=True)}
    pipe.send({"grammars": kind, "compiled": count, "kept": len(shelf), **{k: round(v, 1) for k, v in most.items()}})
    shelf.close()


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    for kind in KINDS:
        if args.only and not any(name in kind for name in args.only):
            continue
        ours, theirs = context.Pipe()
        process = context.Process(target=measure, args=(kind, args.outputs, args.tokens, theirs))
        process.start()
        theirs.close()
        yield ours.recv()
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="kinds whose names contain this")
    parser.add_argument("--outputs", type=int, default=2, help="that follow each grammar")
    parser.add_argument("--tokens", type=int, default=100, help="of each output at most")
    args = parser.parse_args()
    print(header("memory of grammars", vars(args)), flush=True)
    print(table(list(rows(args))))


if __name__ == "__main__":
    main()
