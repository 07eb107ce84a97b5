"""Cost of constraints: the same streams with none, some and all of them under JSON schemas, in turn.

python -m benchmarks.guided_gpu Qwen/Qwen3-8B Qwen/Qwen3-0.6B [--streams 64] [--share 0 --share .5 --share 1]

Weights are dummies, so outputs are noise, and no schema can be complete before an output has its tokens: the numbers of
tokens are equal, and printed. All streams follow one schema, that of the comparison with vLLM, or several (`--mixed`).
The vocabulary, as large as the model's, is trained on the installed packages, because its tokens decide what a mask
costs. The engine runs in its own process, without HTTP. TPOT is of the requests without a schema.
"""

import argparse
import asyncio
import json
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from roseinfer.bench.load import make_prompts
from roseinfer.bench.report import header, percentile, table, write_json
from roseinfer.bench.schemas import constrained, endless_schema, record_schema
from roseinfer.config.hub import load_tokenizer
from roseinfer.core.guide import GuideSpec
from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.api import Engine, GenerateRequest
from roseinfer.engine.options import make_engine_config
from roseinfer.engine.start import start_engine
from roseinfer.grammar.constraint import JsonOptions
from roseinfer.grammar.json_schema import schema_text
from roseinfer.grammar.lark import serialised

SPARE_IDS = 293  # ids of 151,936 that have no token in Qwen3's tokenizer
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TRAINING_CHARACTERS = 60_000_000


@dataclass(frozen=True, slots=True)
class Run:
    """One closed batch. `tpot_s`: of each request without a schema. `mask_s`: of each step with masks."""

    share: float
    output_tokens: int
    wall_s: float
    tpot_s: list[float]
    mask_s: list[float]

    @property
    def rate(self) -> float:
        return self.output_tokens / self.wall_s


def make_tokenizer(target: Path, vocab_size: int) -> None:
    """Write a tokenizer of about `vocab_size` tokens to a folder, trained on the code of the installed packages.

    Takes a minute or two. Texts are split into pieces as by Qwen's tokenizer.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - SPARE_IDS,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=2,
    )
    backend.train_from_iterator(_texts(), trainer)
    backend.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (target / "config.json").write_text("{}")


def _texts() -> Iterator[str]:
    """Yield the installed sources in order of their names, up to a number of characters."""
    left = TRAINING_CHARACTERS
    for name in ("stdlib", "platlib"):
        for path in sorted(Path(sysconfig.get_path(name)).rglob("*.py")):
            text = path.read_text(errors="ignore")
            left -= len(text)
            if left < 0:
                return
            yield text


def guide(number: int | None, tokens: int) -> GuideSpec:
    """Return the guide of schema `number`; None: the schema of the comparison with vLLM."""
    schema = record_schema(tokens) if number is None else endless_schema(number, tokens)
    text = schema_text(schema, strict=True, options=JsonOptions()).text
    return GuideSpec(grammar=serialised([{"json_schema": json.loads(text)}]))


class Measurement:
    """Batches on one engine."""

    def __init__(self, engine: Engine, args: argparse.Namespace) -> None:
        self._engine = engine
        self._args = args
        self._mask_s: list[float] = []
        self._batches = 0
        engine.on_step(lambda step: self._mask_s.append(step.mask_s) if step.mask_s else None)

    async def run(self, share: float, output_len: int) -> Run:
        """Run all streams at once to their end. Prompts are new each time, and equal for every share."""
        args = self._args
        await asyncio.sleep(1.0)  # the engine reports its last steps within half a second
        self._mask_s.clear()
        self._batches += 1
        prompts = make_prompts(args.streams, args.input_len, args.vocab, args.seed + self._batches)
        began_s = time.perf_counter()
        streams = await asyncio.gather(
            *(self._read(f"{self._batches}/{i}", i, ids, share, output_len) for i, ids in enumerate(prompts))
        )
        wall_s = time.perf_counter() - began_s
        free = [stream for i, stream in enumerate(streams) if not constrained(i, share)]
        tpot_s = [(chunks[-1][0] - chunks[0][0]) / (output_len - 1) for chunks in free if output_len > 1]
        tokens = sum(count for chunks in streams for _, count in chunks)
        await asyncio.sleep(1.0)
        return Run(share, tokens, wall_s, tpot_s, list(self._mask_s))

    async def _read(
        self, name: str, number: int, prompt_ids: list[int], share: float, output_len: int
    ) -> list[tuple[float, int]]:
        params = SequenceParams(max_tokens=output_len, temperature=self._args.temperature, seed=number, ignore_eos=True)
        kind = number if self._args.mixed else None
        spec = guide(kind, output_len) if constrained(number, share) else None
        request = GenerateRequest(request_id=name, prompt=Prompt(prompt_ids, params, guide=spec))
        chunks = [(time.perf_counter(), len(chunk.token_ids)) async for chunk in self._engine.generate(request)]
        assert sum(count for _, count in chunks) == output_len, "an output was complete too early"
        return chunks


async def measure(model: str, args: argparse.Namespace, tokenizer: Path | None) -> list[Run]:
    """Run every share `args.rounds` times, in turn, each round in another order."""
    options: dict[str, Any] = {"tokenizer": str(tokenizer)} if tokenizer else {}
    if args.num_kv_blocks:
        options["num_kv_blocks"] = args.num_kv_blocks
    config = make_engine_config(
        model=model,
        load_format=args.load_format,
        max_num_seqs=args.streams,
        max_model_len=args.input_len + args.output_len,
        seed=args.seed,
        threads=args.threads,
        overlap=args.overlap,
        **options,
    )
    engine = await start_engine(config, load_tokenizer(config.model))
    try:
        measurement = Measurement(engine, args)
        for share in args.share:
            await measurement.run(share, min(64, args.output_len))
        runs = []
        for number in range(args.rounds):
            turn = number % len(args.share)
            for share in args.share[turn:] + args.share[:turn]:
                runs.append(await measurement.run(share, args.output_len))
    finally:
        await engine.close()
    return runs


def summarise(model: str, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a row for each share; rates are medians of the runs, shares are relative to the first."""
    by_share: dict[float, list[Run]] = {}
    for run in runs:
        by_share.setdefault(run.share, []).append(run)
    rows: list[dict[str, Any]] = []
    for share, own in by_share.items():
        rate = median(run.rate for run in own)
        tpot_s = [one for run in own for one in run.tpot_s]
        mask_s = [one for run in own for one in run.mask_s]
        rows.append(
            {
                "model": model,
                "constrained": share,
                "output tokens": own[0].output_tokens,
                "tok/s": rate,
                "lowest": min(run.rate for run in own),
                "highest": max(run.rate for run in own),
                "of free": rate / rows[0]["tok/s"] if rows else 1.0,
                "free TPOT ms p50": 1e3 * percentile(tpot_s, 50) if tpot_s else None,
                "free TPOT ms p99": 1e3 * percentile(tpot_s, 99) if tpot_s else None,
                "masks ms p50": 1e3 * percentile(mask_s, 50) if mask_s else None,
                "masks ms p99": 1e3 * percentile(mask_s, 99) if mask_s else None,
            }
        )
    return rows


def read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="packaged shapes, or models")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=512)
    parser.add_argument("--share", type=float, action="append", help="of the streams that have a schema, the first 0")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--load-format", default="dummy", choices=("dummy", "auto"))
    parser.add_argument("--made-tokenizer", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--tokenizer", type=Path, help="folder, instead of one that is trained")
    parser.add_argument("--mixed", action="store_true", help="schemas of several kinds instead of one for all")
    parser.add_argument("--vocab", type=int, default=151_936, help="of the models")
    parser.add_argument("--num-kv-blocks", type=int)
    parser.add_argument("--threads", type=int, help="of torch, on a CPU")
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    args.share = args.share or [0.0, 0.5, 1.0]
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = read_arguments(argv)
    print(header("constrained streams", vars(args)), flush=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models:
            tokenizer = args.tokenizer
            if args.made_tokenizer and tokenizer is None:
                tokenizer = Path(folder)
                if not (tokenizer / "tokenizer.json").exists():
                    make_tokenizer(tokenizer, args.vocab)
            rows += summarise(model, asyncio.run(measure(model, args, tokenizer)))
            print(table(rows), flush=True)
    if args.json:
        write_json(args.json, {"rows": rows}, vars(args))


if __name__ == "__main__":
    main()
