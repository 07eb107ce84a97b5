"""What `roseinfer train-predictor` learns from: prompts, and how long a model's answers to them are.

    python -m benchmarks.length_data --out lengths.jsonl [--num 3000] [--model tiny] [--max-tokens 512] [--samples 1]
                                      [--seed 0]

Prompts are beginnings of functions and classes of the standard library of the running interpreter, cut at a random
place: what the embedded model continues. Sampled at temperature 1 with top-p 0.9. One JSON object a line:
`{"prompt_token_ids": [...], "output_len": n}`; an answer that reaches --max-tokens counts as that long. --samples gives
each prompt several answers, a row each, which shows how much of a length is chance.
"""

import argparse
import ast
import json
import random
import sysconfig
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

from roseinfer.core.sampling import SamplingParams
from roseinfer.engine.llm import LLM

AT_ONCE = 512


def definitions(folder: Path) -> Iterator[str]:
    """The source of each function, class and method, without its indentation."""
    for path in sorted(folder.rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])) + "\n"


def prompts(texts: list[str], llm: LLM, count: int, longest: int, rng: random.Random) -> list[list[int]]:
    """Beginnings of different texts: at least four tokens, at most `longest` and nine tenths of the text."""
    found = []
    for text in rng.sample(texts, len(texts)):
        ids = llm.tokenizer.encode(text)
        if len(ids) >= 8:
            found.append(ids[: rng.randint(4, max(4, min(longest, len(ids) * 9 // 10)))])
        if len(found) == count:
            break
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num", type=int, default=3000)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    texts = list(definitions(Path(sysconfig.get_paths()["stdlib"])))
    params = SamplingParams(max_tokens=args.max_tokens, temperature=1.0, top_p=0.9)
    options = {"max_num_seqs": args.max_num_seqs, "threads": args.threads, "seed": args.seed}
    start = time.perf_counter()
    with LLM(args.model, **options) as llm, args.out.open("w", encoding="utf-8") as file:
        asked = prompts(texts, llm, args.num, llm.info.max_model_len - args.max_tokens, rng)
        for first in range(0, len(asked), AT_ONCE):
            for done in llm.generate(asked[first : first + AT_ONCE], params, n=args.samples):
                for sample in done.samples:
                    row = {"prompt_token_ids": done.prompt_ids, "output_len": len(sample.token_ids)}
                    file.write(json.dumps(row, separators=(",", ":")) + "\n")
            file.flush()
            done_prompts, spent_s = min(first + AT_ONCE, len(asked)), time.perf_counter() - start
            print(f"{done_prompts} of {len(asked)} prompts, {spent_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
