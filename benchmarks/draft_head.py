"""Cost of a random EAGLE-3 head beside a model with dummy weights; see `benchmarks.speculation eagle`."""

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from roseinfer.core.plan import Admission, Row, StepPlan
from roseinfer.core.runner import Runner
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.core import EngineCore

DRAFTED_VOCAB_SIZE = 32_000
STEPS_COUNT, SAMPLES_COUNT = 40, 5
_CHUNK_TOKENS = 1024


def write_head(target: Path, out: Path) -> Path:
    """Write the config.json of a head as SpecForge shapes it for the target in this folder. It drafts 32,000 tokens."""
    model = json.loads((target / "config.json").read_text())
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rope_theta")
    config = {name: model[name] for name in (*names, "vocab_size", "max_position_embeddings", "rms_norm_eps")}
    width = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    config |= {"head_dim": width, "hidden_act": "silu", "num_hidden_layers": 1, "tie_word_embeddings": False}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "attention_bias": False}
    config |= {"draft_vocab_size": min(DRAFTED_VOCAB_SIZE, model["vocab_size"])}
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return out


@dataclass(frozen=True)
class Kind:
    """Step in which each row verifies so many drafts, and the head then drafts so many tokens."""

    drafts: int = 0
    ahead: int = 0


class Steps:
    """Rows with a context, which an engine's runner computes again and again, without a scheduler."""

    def __init__(self, core: EngineCore, context: int, rows: int, block_size: int, vocab: int) -> None:
        self._runner: Runner = core.runner
        self._context, self._rows, self._number = context, rows, 0
        blocks = -(-(context + 32) // block_size)
        tables = [tuple(range(row * blocks, (row + 1) * blocks)) for row in range(rows)]
        params = SequenceParams(max_tokens=64, temperature=0.0, ignore_eos=True)
        ids = [[(7 * row + 31 * at) % vocab for at in range(context + 1)] for row in range(rows)]
        admitted = [Admission(f"{row}", row, ids[row], context, params, row, (), tables[row]) for row in range(rows)]
        for row in range(rows):
            for start in range(0, context, _CHUNK_TOKENS):
                count = min(_CHUNK_TOKENS, context - start)
                chunk = Row(f"{row}", row, start, count, 0, False, start, 0, ())
                plan = StepPlan(self._next(), [chunk], admitted if row == start == 0 else [], num_tokens=count)
                self._collect(self._launch(plan))

    def close(self) -> None:
        self._collect(self._launch(StepPlan(self._next(), [], released=list(range(self._rows)))))

    def seconds(self, kind: Kind, depth: int) -> float:
        """Return the median time of a step, with `depth` steps in flight."""
        samples = []
        for _ in range(1 + SAMPLES_COUNT):  # the first one compiles what is left to compile
            flight = [self._launch(self._plan(kind)) for _ in range(depth)]
            self._collect(flight.pop(0))
            start_s = perf_counter()
            for _ in range(STEPS_COUNT):
                flight.append(self._launch(self._plan(kind)))
                self._collect(flight.pop(0))
            samples.append((perf_counter() - start_s) / STEPS_COUNT)
            for handle in flight:
                self._collect(handle)
        return statistics.median(samples[1:])

    def _plan(self, kind: Kind) -> StepPlan:
        more, drafts = kind.drafts, (5,) * kind.drafts
        rows = [
            Row(f"{row}", row, self._context, 1 + more, 1 + more, True, self._context, 0, (), drafts)
            for row in range(self._rows)
        ]
        plan = StepPlan(self._next(), rows, num_tokens=self._rows * (1 + more), num_drafts=self._rows * more)
        plan.ahead = (kind.ahead,) * self._rows if kind.ahead else ()
        return plan

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _launch(self, plan: StepPlan) -> object:
        handle = self._runner.submit(plan)
        self._runner.sample(handle)
        return handle

    def _collect(self, handle: object) -> None:
        self._runner.collect(handle)


def measure(
    core: EngineCore, context: int, counts: Sequence[int], block_size: int, vocab: int
) -> Iterator[dict[str, str]]:
    """Yield a line of figures for each number of rows."""
    for rows in counts:
        steps = Steps(core, context, rows, block_size, vocab)
        found = {
            kind: steps.seconds(kind, depth)
            for kind, depth in ((Kind(), 2), (Kind(3), 2), (Kind(ahead=1), 2), (Kind(ahead=5), 2), (Kind(3, 4), 2))
        }
        serial = {kind: steps.seconds(kind, 1) for kind in (Kind(), Kind(3), Kind(3, 4))}
        steps.close()
        plain = found[Kind()]
        yield {
            "rows": str(rows),
            "step ms": f"{1e3 * plain:.3f}",
            "4 tokens ms": f"{1e3 * found[Kind(3)]:.3f}",
            "4 tokens / 1": f"{found[Kind(3)] / plain:.3f}",
            "first draft ms": f"{1e3 * (found[Kind(ahead=1)] - plain):.3f}",
            "draft step ms": f"{1e3 * (found[Kind(ahead=5)] - found[Kind(ahead=1)]) / 4:.3f}",
            "4 tokens + 4 drafts ms": f"{1e3 * found[Kind(3, 4)]:.3f}",
            "one in flight: 1, 4, 4 + 4 drafts ms": ", ".join(f"{1e3 * own:.3f}" for own in serial.values()),
        }
