"""What the masks of a step take: rows, threads, and how many times the grammar that they share was compiled.

python -m benchmarks.mask_cost [--rows 64] [--tokenizer FOLDER] [--threads 1 --threads 8]

Rows follow one schema, or one of several kinds in turn (`--mixed`). Each draws evenly from what it is allowed, so that
all of them are in different states. Nothing of a model runs.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.guided_gpu import guide, make_tokenizer
from roseinfer.bench.report import header, percentile, table
from roseinfer.core.plan import TokenMasks
from roseinfer.grammar.library import Grammar, GrammarTokens, MaskThreads, compile_grammar
from roseinfer.text.tokenizer import Tokenizer


def grammars(tokens: GrammarTokens, lanes: int, steps: int, mixed: bool) -> list[Grammar]:
    made = []
    for number in range(4 if mixed else 1):
        text = guide(number if mixed else None, 4 * steps).grammar
        grammar = compile_grammar(text, tokens)
        grammar.widen([compile_grammar(text, tokens) for _ in range(lanes - 1)])
        made.append(grammar)
    return made


def measure(tokens: GrammarTokens, rows: int, threads: int, lanes: int, args: argparse.Namespace) -> dict[str, Any]:
    """Of `args.steps` steps: seconds of the masks, and of telling the matchers what was drawn."""
    kinds = grammars(tokens, lanes, args.steps, args.mixed)
    matchers = [kinds[i % len(kinds)].matcher() for i in range(rows)]
    line = TokenMasks.words_per_line(tokens.vocab_size)
    words = np.zeros((rows, line), dtype=np.uint32)
    rng = random.Random(args.seed)
    pool = MaskThreads(threads)
    fill = pool._fill_one_by_one if threads == 1 else pool._fill_on_threads
    masks_s, consumed_s = [], []
    for _ in range(args.steps):
        began_s = time.perf_counter()
        fill(matchers, memoryview(words.reshape(-1)))  # type: ignore[arg-type]  # it is a buffer
        masks_s.append(time.perf_counter() - began_s)
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        drawn = [int(rng.choice(row.nonzero()[0])) for row in bits]
        began_s = time.perf_counter()
        for matcher, token in zip(matchers, drawn, strict=True):
            matcher.consume((token,))
        consumed_s.append(time.perf_counter() - began_s)
    return {
        "rows": rows,
        "threads": threads,
        "lanes": lanes,
        "masks us mean": 1e6 * mean(masks_s),
        "p50": 1e6 * percentile(masks_s, 50),
        "p90": 1e6 * percentile(masks_s, 90),
        "p99": 1e6 * percentile(masks_s, 99),
        "consume us p50": 1e6 * percentile(consumed_s, 50),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, action="append")
    parser.add_argument("--threads", type=int, action="append")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--mixed", action="store_true", help="rows follow different schemas")
    parser.add_argument("--tokenizer", type=Path, help="folder; default: one is trained")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(header("masks", vars(args)), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        if args.tokenizer is None:
            args.tokenizer = Path(folder)
            make_tokenizer(args.tokenizer, args.vocab)
        tokenizer = Tokenizer.from_folder(args.tokenizer)
    tokens = GrammarTokens.of(tokenizer, max(args.vocab, tokenizer.vocab_size), (tokenizer.eos_token_id or 0,))
    measured = []
    for rows in args.rows or [32, 64]:
        for threads in args.threads or [1, 2, 4, 8, 16]:
            for lanes in [1] if threads == 1 else [1, threads]:
                measured.append(measure(tokens, rows, threads, lanes, args))
                print(table(measured[-1:]), flush=True)
    print(table(measured))


if __name__ == "__main__":
    main()
