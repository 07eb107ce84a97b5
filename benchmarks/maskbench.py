"""Schemas and documents of MaskBench: what is accepted and rejected, and the cost of compilation and masks.

    python -m benchmarks.maskbench FOLDER [--tokenizer FOLDER] [--every 1] [--timeout 10]
    python -m benchmarks.maskbench FOLDER --server http://127.0.0.1:8000

FOLDER holds files of guidance-ai/jsonschemabench's `maskbench/data`: {"schema", "tests": [{"valid", "data"}]}. Each
document is written as JSON with a space after commas and colons, split into the tokenizer's tokens, and followed with a
mask before every token. xgrammar is in the table if it can be imported. A schema and its documents get `--timeout`
seconds.

With --server, each schema is sent to a server that has not seen it, together with the same request without one; the
result is the delay of the first token.
"""

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import multiprocessing
import re
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import httpx

from roseinfer.bench.report import header, percentile
from roseinfer.config.hub import load_tokenizer
from roseinfer.core.config.engine import ModelConfig
from roseinfer.grammar.build import build_grammar
from roseinfer.grammar.constraint import JsonSchema
from roseinfer.grammar.json_schema import explain_error
from roseinfer.grammar.library import Grammar, GrammarError, GrammarTokens, MatcherError, compile_grammar
from roseinfer.text.tokenizer import Tokenizer


class Refused(Exception):
    """The backend rejects the schema."""


class GivenUp(Exception):
    """A mask would cost more than the backend allows; such a request ends with an error."""


class Following(Protocol):
    """State of a document within a grammar."""

    def mask(self) -> None:
        """Compute the next mask. Raises `GivenUp`."""
        ...

    def allows(self, token: int) -> bool:
        """Return True if the last mask allows the token."""
        ...

    def take(self, token: int) -> None: ...


class Backend(Protocol):
    name: str

    def compile(self, schema: dict[str, Any]) -> Any:
        """Compile a schema. Raises `Refused`."""
        ...

    def start(self, grammar: Any) -> Following: ...


class Ours:
    """Our grammars, checked as for requests and compiled as in the engine."""

    def __init__(self, tokenizer: Tokenizer, strict: bool) -> None:
        version = importlib.metadata.version("llguidance")
        self.name = f"roseinfer, {'strict' if strict else 'lenient'} (llguidance {version})"
        self._strict = strict
        self._tokens = GrammarTokens.of(tokenizer, tokenizer.vocab_size, [end_of(tokenizer)])

    def compile(self, schema: dict[str, Any]) -> Grammar:
        try:
            return compile_grammar(
                build_grammar(JsonSchema(schema=schema, strict=self._strict), {}).grammar, self._tokens
            )
        except GrammarError as error:
            raise Refused(explain_error(error).message) from error

    def start(self, grammar: Grammar) -> "OursFollowing":
        return OursFollowing(grammar, self._tokens.vocab_size)


class OursFollowing:
    def __init__(self, grammar: Grammar, vocab_size: int) -> None:
        self._matcher = grammar.matcher()
        self._words = memoryview(array("I", bytes(4 * ((vocab_size + 31) // 32))))

    def mask(self) -> None:
        try:
            self._matcher.fill(self._words)
        except MatcherError as error:
            raise GivenUp from error

    def allows(self, token: int) -> bool:
        return bool(self._words[token // 32] >> token % 32 & 1)

    def take(self, token: int) -> None:
        self._matcher.consume([token])


class XGrammar:
    """xgrammar with one thread, any white space, and additional properties as in JSON Schema."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        xgrammar = importlib.import_module("xgrammar")

        self._library = xgrammar
        self.name = f"xgrammar {importlib.metadata.version('xgrammar')}"
        size = tokenizer.vocab_size
        names = [tokenizer.backend.id_to_token(id) or "" for id in range(size)]
        self._info = xgrammar.TokenizerInfo(
            names, vocab_type=xgrammar.VocabType.BYTE_LEVEL, vocab_size=size, stop_token_ids=[end_of(tokenizer)]
        )
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)

    def compile(self, schema: dict[str, Any]) -> Any:
        try:
            return self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=True, strict_mode=False)
        except Exception as error:  # every exception is about the schema
            raise Refused(f"{type(error).__name__}: {error}") from error

    def start(self, grammar: Any) -> "XGrammarFollowing":
        return XGrammarFollowing(self._library, grammar, self._info.vocab_size)


class XGrammarFollowing:
    def __init__(self, library: Any, grammar: Any, vocab_size: int) -> None:
        self._matcher = library.GrammarMatcher(grammar)
        self._bits = library.allocate_token_bitmask(1, vocab_size)

    def mask(self) -> None:
        self._matcher.fill_next_token_bitmask(self._bits)

    def allows(self, token: int) -> bool:
        return bool(int(self._bits[0][token // 32]) >> token % 32 & 1)

    def take(self, token: int) -> None:
        self._matcher.accept_token(token)


def end_of(tokenizer: Tokenizer) -> int:
    return 0 if tokenizer.eos_token_id is None else tokenizer.eos_token_id


def backend_of(kind: str, tokenizer: Tokenizer) -> Backend:
    return XGrammar(tokenizer) if kind == "xgrammar" else Ours(tokenizer, strict=kind == "strict")


@dataclass
class Outcome:
    """Result of one schema. `refused`: the reason, None if it compiled. Times in seconds, counts of documents."""

    refused: str | None = None
    compile_s: float = 0.0
    masks_s: list[float] = field(default_factory=list)
    wrongly_accepted: int = 0
    wrongly_rejected: int = 0
    given_up: int = 0


def outcome(backend: Backend, tokenizer: Tokenizer, case: dict[str, Any]) -> Outcome:
    found = Outcome()
    started_s = time.perf_counter()
    try:
        grammar = backend.compile(case["schema"])
    except Refused as error:
        found.refused = str(error)
        return found
    finally:
        found.compile_s = time.perf_counter() - started_s
    for test in case["tests"]:
        text = json.dumps(test["data"], ensure_ascii=False)
        ids = [*tokenizer.encode(text, add_special_tokens=False), end_of(tokenizer)]
        try:
            accepted = follows(backend.start(grammar), ids, found.masks_s)
        except GivenUp:
            found.given_up += 1
            continue
        found.wrongly_accepted += accepted and not test["valid"]
        found.wrongly_rejected += test["valid"] and not accepted
    return found


def follows(document: Following, ids: list[int], masks_s: list[float]) -> bool:
    """Return True if the whole document is allowed, including its end."""
    for position, token in enumerate(ids):
        started_s = time.perf_counter()
        document.mask()
        masks_s.append(time.perf_counter() - started_s)
        if not document.allows(token):
            return False
        if position < len(ids) - 1:
            document.take(token)
    return True


def work(pipe: Connection, kind: str, tokenizer_folder: str | None) -> None:
    tokenizer = tokenizer_in(tokenizer_folder)
    backend = backend_of(kind, tokenizer)
    pipe.send(backend.name)
    while True:
        pipe.send(outcome(backend, tokenizer, pipe.recv()))


class Worker:
    def __init__(self, kind: str, tokenizer_folder: str | None, timeout_s: float) -> None:
        self._arguments = (kind, tokenizer_folder)
        self._timeout_s = timeout_s
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=work, args=(other, *self._arguments), daemon=True)
        self._process.start()
        other.close()
        self.name: str = self._pipe.recv()

    def ask(self, case: dict[str, Any]) -> Outcome:
        self._pipe.send(case)
        with contextlib.suppress(EOFError, ConnectionResetError):
            if self._pipe.poll(self._timeout_s):
                return self._pipe.recv()
        self.close()
        self._start()
        return Outcome("took too long, or ended the process", self._timeout_s)

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def tokenizer_in(folder: str | None) -> Tokenizer:
    return load_tokenizer(ModelConfig(model=folder or "tiny"))


def reason(refused: str) -> str:
    """Return the reason of a rejection without parts of the schema."""
    keywords = re.search(r"strict, and (.*) cannot be enforced", refused)
    if keywords is not None:
        return keywords[1].replace("'", "")
    return re.sub(r"'[^']*'|\"[^\"]*\"|/[^ ]*|\d+", "..", (refused.splitlines() or [""])[0])[:70]


def rows(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, str]]:
    taken = [found for found in outcomes if found.refused is None]
    yield "schemas taken", f"{len(taken)} of {len(outcomes)}"
    yield "invalid documents accepted", str(sum(found.wrongly_accepted for found in taken))
    yield "valid documents rejected", str(sum(found.wrongly_rejected for found in taken))
    yield "documents given up", str(sum(found.given_up for found in taken))
    if not taken:
        return
    compile_ms = [1000 * found.compile_s for found in taken]
    masks_us = [1e6 * seconds for found in taken for seconds in found.masks_s] or [0.0]
    yield "compile p50 / p99 / max, ms", " / ".join(f"{x:.1f}" for x in (*of(compile_ms, 50, 99), max(compile_ms)))
    mean = sum(masks_us) / len(masks_us)
    p50, p99 = of(masks_us, 50, 99)
    yield "mask p50 / mean / p99 / max, us", f"{p50:.0f} / {mean:.0f} / {p99:.0f} / {max(masks_us):.0f}"
    yield "masks", str(len(masks_us))


def of(values: list[float], *shares: float) -> list[float]:
    return [percentile(sorted(values), share) for share in shares]


def table(columns: dict[str, list[Outcome]]) -> str:
    per_column = [dict(rows(outcomes)) for outcomes in columns.values()]
    names = list(dict.fromkeys(name for column in per_column for name in column))
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    lines += [f"| {name} | " + " | ".join(column.get(name, "") for column in per_column) + " |" for name in names]
    return "\n".join(lines)


def refusals(outcomes: Sequence[Outcome]) -> str:
    counted = Counter(reason(found.refused) for found in outcomes if found.refused is not None)
    return "\n".join(f"  {count:4d}  {why}" for why, count in counted.most_common())


def cases(folder: Path, every: int) -> list[dict[str, Any]]:
    files = sorted(folder.glob("*.json"))[::every]
    return [json.loads(path.read_text(encoding="utf-8")) for path in files]


def compare(found: list[dict[str, Any]], tokenizer_folder: str | None, timeout_s: float) -> None:
    kinds = ["strict", "lenient"] + (["xgrammar"] if importlib.util.find_spec("xgrammar") else [])
    columns: dict[str, list[Outcome]] = {}
    for kind in kinds:
        worker = Worker(kind, tokenizer_folder, timeout_s)
        columns[worker.name] = [worker.ask(case) for case in found]
        worker.close()
    print(table(columns))
    for name, outcomes in columns.items():
        print(f"\nrefused by {name}:\n{refusals(outcomes)}")


def first_token_s(client: httpx.Client, body: dict[str, Any]) -> float | None:
    """Return seconds to the first token of a stream, None if the request is rejected."""
    started_s = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            return None
        for line in answer.iter_lines():
            if '"content":"' in line and '"role"' not in line:
                return time.perf_counter() - started_s
    return None


def delays(url: str, found: list[dict[str, Any]]) -> tuple[list[float], int]:
    """Return the delay of the first token under each schema in seconds, and the number of rejections.

    The two requests of a pair run one after the other; in every second pair the one without a schema is first.
    """
    late: list[float] = []
    refused = 0
    with httpx.Client(base_url=url, timeout=60) as client:
        for number, case in enumerate(itertools.chain(found[:1], found)):
            text = f"Document {number}, as JSON."
            free = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, "stream": True, "cache_salt": "a"}
            schema = {"name": "s", "schema": case["schema"] | {"$comment": f"{number}"}}
            bound = free | {"response_format": {"type": "json_schema", "json_schema": schema}, "cache_salt": "b"}
            seconds = {}
            for name, body in (("free", free), ("bound", bound))[:: -1 if number % 2 else 1]:
                seconds[name] = first_token_s(client, body)
            if seconds["bound"] is None or seconds["free"] is None:
                refused += 1
            elif number:  # the first one warms up
                late.append(seconds["bound"] - seconds["free"])
    return late, refused


def against_server(url: str, found: list[dict[str, Any]]) -> None:
    late, refused = delays(url, found)
    p50, p90, p99 = of([1000 * seconds for seconds in late], 50, 90, 99)
    print(f"first token later under a schema never seen: p50 {p50:.1f} ms, p90 {p90:.1f} ms, p99 {p99:.1f} ms")
    print(f"{len(late)} schemas, {refused} refused")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", help="folder of a model; default: the embedded one's")
    parser.add_argument("--every", type=int, default=1, help="take each n-th schema only")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds for a schema and its documents")
    parser.add_argument("--server", help="measure the first token at this address instead")
    args = parser.parse_args()
    print(header("maskbench", vars(args)))
    found = cases(args.folder, args.every)
    if args.server:
        against_server(args.server, found)
    else:
        compare(found, args.tokenizer, args.timeout)


if __name__ == "__main__":
    main()
