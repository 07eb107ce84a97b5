"""Speed of one engine with drafts, compared with the same engine without.

    python -m benchmarks.speculation recorded [--model qwen3-8b] [--loads 1:0.2 64:0.8 256:0.8] [--drafts 4]
    python -m benchmarks.speculation eagle [--model qwen3-8b] [--context 1024] [--rows 1 4 16 64]
    python -m benchmarks.speculation text MODEL FILE ... [--methods ngram suffix auto] [--option device=cpu]

`recorded` runs a model of the GPU table with dummy weights. A load is STREAMS:WRONG: that many requests decode at once,
and their drafts are the tokens that they give without drafts, each replaced by a wrong one with probability WRONG. The
weights are such that a text depends on its last token only: else it would change with every rounding.

`eagle` gives that model a random EAGLE-3 head, and measures steps of rows alone: of one token, of a token and three
drafts, and with draft steps of the head after them. Two steps are in flight, as long as nothing else is said. Then it
runs an engine with the head, which is never right, compared with the same engine while it does not draft.

`text` runs a real model on files, one request at a time. "Continue" goes on behind the first tokens of a file. "Repeat"
is given the file and the first lines of a copy, and goes on with the copy, as an answer with an edited file does.

Each load runs without and with drafts in turns, `--repeats` times. Prints output tokens per second from the moment when
all requests have their first token (median, with the range), their ratio, tokens per step and request, and the share of
drafts that were right. The engine core runs in this process: no server, and nothing is tokenised while it runs.
"""

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.draft_head import measure, write_head
from benchmarks.gpu_rows import MODELS
from benchmarks.gpu_table import git_commit
from benchmarks.model_folders import write_folder
from roseinfer.bench.report import header, table
from roseinfer.config.hub import load_tokenizer, model_folder
from roseinfer.core.request import Prompt, Request, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.build import build_engine
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add
from roseinfer.engine.options import make_engine_config
from roseinfer.sched.drafting.counts import ProposerCounts
from roseinfer.sched.drafting.drafting import Drafting
from roseinfer.sched.drafting.proposer import Proposal
from roseinfer.text.tokenizer import Tokenizer


class Spoilt:
    """Proposer of known outputs, each token replaced by a wrong one with probability `wrong`."""

    def __init__(self, outputs: Mapping[str, Sequence[int]], vocab_size: int, wrong: float, seed: int) -> None:
        self._outputs, self._vocab_size, self._wrong = outputs, vocab_size, wrong
        self._random = random.Random(seed)

    def propose(self, request: Request, limit: int, after: tuple[int, ...] = ()) -> Proposal | None:
        first = len(request.tokens) - request.prompt_len + len(after)
        known = self._outputs.get(request.request_id, ())[first : first + limit]
        return Proposal("recorded", tuple(map(self._spoilt, known))) if known else None

    def _spoilt(self, token: int) -> int:
        return (token + 1) % self._vocab_size if self._random.random() < self._wrong else token

    def ended(self, request: Request) -> None:
        pass


@dataclass(frozen=True)
class Run:
    """`rate`: output tokens per second. `outputs`: by sequence. `counts`: of its drafts."""

    rate: float
    outputs: dict[str, list[int]]
    counts: ProposerCounts


def run(core: EngineCore, jobs: Mapping[str, Prompt]) -> Run:
    """Run the jobs at once, and time them from the step after which all have a token."""
    outputs: dict[str, list[int]] = {f"{name}:0": [] for name in jobs}
    for name, prompt in jobs.items():
        core.add(Add(name, prompt))
    start_s, before = 0.0, 0
    while core.busy:
        for output in core.step():
            assert output.end is None or output.end.error is None, output
            outputs[output.request_id] += output.token_ids
        if not start_s and all(outputs.values()):
            start_s, before = perf_counter(), sum(map(len, outputs.values()))
    took_s = perf_counter() - start_s
    total = ProposerCounts()
    drafting = core.scheduler.drafting
    core.scheduler.catch_up()
    for counts in drafting.counts.values() if drafting is not None else ():
        total.steps += counts.steps
        total.drafted += counts.drafted
        total.accepted += counts.accepted
    return Run((sum(map(len, outputs.values())) - before) / took_s, outputs, total)


Jobs = Callable[[int], Mapping[str, Prompt]]


def compare(core: EngineCore, drafting: Drafting, jobs: Jobs, repeats: int) -> dict[str, Any]:
    """Run the jobs without and with drafts in turns. `jobs`: those of a repeat, by its number."""
    rates: dict[str, list[float]] = {"off": [], "on": []}
    counts, tokens, same = ProposerCounts(), 0, 0.0
    for repeat in range(repeats):
        core.scheduler.drafting = None
        off = run(core, jobs(repeat))
        drafting.counts.clear()
        core.scheduler.drafting = drafting
        on = run(core, jobs(repeat))
        core.scheduler.drafting = None
        rates["off"].append(off.rate)
        rates["on"].append(on.rate)
        counts, tokens = on.counts, sum(map(len, on.outputs.values())) - len(on.outputs)
        same += sum(ids == on.outputs[name] for name, ids in off.outputs.items()) / len(off.outputs)
    drafted, accepted = sum(counts.drafted), sum(counts.accepted)
    return {
        **{name: statistics.median(values) for name, values in rates.items()},
        "range": [min(rates["on"]), max(rates["on"])],
        "ratio": statistics.median(on / off for on, off in zip(rates["on"], rates["off"], strict=True)),
        "tokens_per_step": tokens / (tokens - accepted),
        "drafted": drafted,
        "right": accepted / drafted if drafted else 0.0,
        "same_texts": same / repeats,
    }


def show(rows: Mapping[str, Mapping[str, Any]]) -> str:
    return table(
        [
            {
                "load": name,
                "tok/s off": f"{row['off']:,.1f}",
                "tok/s on": f"{row['on']:,.1f}",
                "range": f"{row['range'][0]:,.1f} to {row['range'][1]:,.1f}",
                "on / off": f"{row['ratio']:.3f}",
                "tokens/step": f"{row['tokens_per_step']:.2f}",
                "drafted": f"{row['drafted']:,}",
                "right": f"{row['right']:.2f}",
                "same texts": f"{row['same_texts']:.2f}",
            }
            for name, row in rows.items()
        ]
    )


def start(model: str, folder: Path | None = None, **options: Any) -> tuple[EngineCore, Drafting, int]:
    """Return an engine, its drafting and the size of its vocabulary."""
    config = make_engine_config(model=model, **options)
    core, info = build_engine(config, folder or model_folder(config.model))
    assert isinstance(core, EngineCore) and core.scheduler.drafting is not None
    return core, core.scheduler.drafting, info.facts.vocab_size


def recorded(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    loads = [(int(streams), float(wrong)) for streams, _, wrong in (load.partition(":") for load in args.loads)]
    with tempfile.TemporaryDirectory() as made:
        folder = write_folder(args.model, Path(made))
        options = {"max_model_len": args.context + args.tokens + 16, "max_num_seqs": max(n for n, _ in loads)}
        nothing = Path(made) / "recorded.jsonl"
        nothing.touch()
        method = f"recorded:{nothing},tokens={args.drafts}"
        core, drafting, vocab = start(
            str(folder), folder, load_format="dummy", speculation=method, **{**options, **dict(args.option)}
        )
        rng = random.Random(args.seed)
        params = SequenceParams(max_tokens=args.tokens, temperature=0.0, ignore_eos=True)
        for streams, wrong in loads:
            ids = [rng.choices(range(1000, vocab), k=args.context) for _ in range(streams)]
            jobs = {f"{streams}-{wrong}-{i}": Prompt(own, params) for i, own in enumerate(ids)}
            core.scheduler.drafting = None
            drafting.proposers = (Spoilt(run(core, jobs).outputs, vocab, wrong, args.seed),)
            name = f"{streams} streams, {wrong:g} wrong"
            yield name, compare(core, drafting, partial(unchanged, jobs), args.repeats)
        core.close()


def eagle(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as made:
        folder = write_folder(args.model, Path(made))
        head = write_head(folder, Path(made) / "head")
        options = {"max_model_len": args.context + args.tokens + 64, "max_num_seqs": max(*args.rows, *args.streams)}
        method = f"eagle3:{head},tokens=7"
        core, drafting, vocab = start(
            str(folder), folder, load_format="dummy", speculation=method, **{**options, **dict(args.option)}
        )
        print(table(list(measure(core, args.context, args.rows, args.block_size, vocab))), flush=True)
        rng = random.Random(args.seed)
        params = SequenceParams(max_tokens=args.tokens, temperature=0.0, ignore_eos=True)
        for streams in args.streams:
            ids = [rng.choices(range(1000, vocab), k=args.context) for _ in range(streams)]
            jobs = {f"{streams}-{i}": Prompt(own, params) for i, own in enumerate(ids)}
            yield f"{streams} streams", compare(core, drafting, partial(unchanged, jobs), args.repeats)
        core.close()


def unchanged(jobs: Mapping[str, Prompt], repeat: int) -> Mapping[str, Prompt]:
    return jobs


def prompts_of(tokenizer: Tokenizer, file: Path, args: argparse.Namespace) -> dict[str, Prompt]:
    """Return the prompt of each task. Each is for itself: no finished output of another helps."""
    params = SequenceParams(max_tokens=args.tokens, temperature=0.0, ignore_eos=True)
    ids = tokenizer.encode(file.read_text())[: args.context]
    again = [*ids, *tokenizer.encode("\n\n# The same file again:\n"), *ids[:24]]
    return {"continue": Prompt(ids, params), "repeat": Prompt(again, params)}


def salted(name: str, prompt: Prompt, repeat: int) -> dict[str, Prompt]:
    """Return the job of a repeat. No repeat may guess from the output of another."""
    return {name: replace(prompt, meta=RequestMeta(cache_salt=f"{name} {len(prompt.ids)} {repeat}"))}


def text(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    for method in args.methods:
        core, drafting, _ = start(args.model, speculation=method, **{"max_num_seqs": 1, **dict(args.option)})
        tokenizer = load_tokenizer(make_engine_config(model=args.model).model)
        tasks = {file: prompts_of(tokenizer, file, args) for file in args.files}
        for task in next(iter(tasks.values())):
            rows = [
                compare(core, drafting, partial(salted, file.name, prompts[task]), args.repeats)
                for file, prompts in tasks.items()
            ]
            yield f"{method}, {task}", mean_of(rows)
        core.close()


def mean_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the means over files; each counts alike."""
    found = {name: statistics.mean(row[name] for row in rows) for name in rows[0] if name != "range"}
    found["drafted"] = sum(row["drafted"] for row in rows)
    found["range"] = [min(row["range"][0] for row in rows), max(row["range"][1] for row in rows)]
    return found


KINDS = {"recorded": recorded, "eagle": eagle, "text": text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    dummy = kinds.add_parser("recorded")
    dummy.add_argument("--model", default="qwen3-8b", choices=list(MODELS))
    dummy.add_argument("--loads", nargs="+", default=["1:0.2", "64:0.8", "256:0.8"], metavar="STREAMS:WRONG")
    dummy.add_argument("--context", type=int, default=512, help="tokens of each prompt")
    dummy.add_argument("--drafts", type=int, default=4, help="most of a request in a step")
    dummy.add_argument(
        "--option", action="append", default=[], type=_option, metavar="NAME=VALUE", help="of the engine"
    )
    head = kinds.add_parser("eagle")
    head.add_argument("--model", default="qwen3-8b", choices=list(MODELS))
    head.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 64], help="of the steps that are measured")
    head.add_argument("--streams", nargs="*", type=int, default=[1, 64], help="of the engine")
    head.add_argument("--context", type=int, default=1024, help="tokens of each prompt")
    head.add_argument("--block-size", type=int, default=16)
    head.add_argument("--option", action="append", default=[], type=_option, metavar="NAME=VALUE", help="of the engine")
    real = kinds.add_parser("text")
    real.add_argument("model")
    real.add_argument("files", nargs="+", type=Path)
    real.add_argument("--methods", nargs="+", default=["ngram", "suffix"])
    real.add_argument("--context", type=int, default=300, help="most tokens of a file")
    real.add_argument("--option", action="append", default=[], type=_option, metavar="NAME=VALUE", help="of the engine")
    for kind in (dummy, head, real):
        kind.add_argument("--tokens", type=int, default=256, help="of each output")
        kind.add_argument("--repeats", type=int, default=3)
        kind.add_argument("--seed", type=int, default=0)
        kind.add_argument("--commit", help="of roseinfer, where there is no git repository to ask")
        kind.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args()
    said = {name: value for name, value in vars(args).items() if name not in ("kind", "json", "option", "commit")}
    print(header(f"speculation {args.kind}", {"commit": args.commit or git_commit(), **said}))
    rows = {}
    for name, row in KINDS[args.kind](args):
        rows[name] = row
        print(show({name: row}), flush=True)
    print(show(rows))
    if args.json is not None:
        args.json.write_text(json.dumps(rows) + "\n")


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, int(value) if value.isdigit() else value


if __name__ == "__main__":
    main()
