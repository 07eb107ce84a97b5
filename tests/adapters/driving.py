"""Drive a runner with adapters by hand: prompts of several adapters in the same steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from roseinfer.core.adapters import Adapter, AdapterLoad
from roseinfer.core.config.adapters import AdapterConfig
from roseinfer.core.config.engine import CacheConfig, EngineConfig, ModelConfig
from roseinfer.core.config.speculation import SpeculationConfig
from roseinfer.core.plan import Admission, Row, SlotChange, StateChanges, StepPlan, StepResult, TokenLogprobs
from roseinfer.core.sampling import SequenceParams
from roseinfer.runner.build import BuiltRunner, build_runner
from roseinfer.sched.registry import scheduler_config
from tests.runner.tiny import run

BLOCK_SIZE, NUM_BLOCKS, MAX_SEATS = 8, 64, 8
LISTED = 4
CACHE = {"block_size": BLOCK_SIZE, "num_kv_blocks": NUM_BLOCKS, "enable_window_groups": False, "state_slots": 8}


def config_of(
    *named: str, model: dict | None = None, cache: dict | None = None, speculation: str = "off", **options: object
) -> EngineConfig:
    """Return a config with adapters NAME=PATH; without any and without options, with adapters off."""
    return EngineConfig(
        model=ModelConfig(**{"device": "cpu", "dtype": "float32", "threads": 1, **(model or {})}),
        cache=CacheConfig(**(cache or CACHE)),
        scheduler=scheduler_config(max_num_seqs=MAX_SEATS, max_num_batched_tokens=128),
        speculation=SpeculationConfig(speculation=speculation),
        adapters=AdapterConfig(lora=named, **options),
    )


def build(folder: Path, *named: str, **options: object) -> BuiltRunner:
    return build_runner(config_of(*named, **options), folder)


class Output(NamedTuple):
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    prompt: tuple[TokenLogprobs, ...]


class Driver:
    """Runner with its adapters, of which the named ones are loaded into slots in their order."""

    def __init__(self, built: BuiltRunner) -> None:
        self.built = built
        self._steps = self.guessed = 0
        self.named: dict[str, Adapter] = {}
        self.slots: dict[str | None, int] = {None: -1}
        if built.adapters is not None:
            for slot, result in enumerate(built.adapters.take_read()):
                assert result.adapter is not None
                self.named[result.name] = result.adapter
                self.load(slot, result.adapter.digest)
                self.slots[result.name] = slot

    def load(self, slot: int, digest: str) -> None:
        self._step(StepPlan(0, [], adapter_loads=(AdapterLoad(slot, digest),)))

    def _step(self, plan: StepPlan) -> StepResult:
        plan.step = self._steps
        self._steps += 1
        return run(self.built.runner, plan)

    def run(
        self,
        requests: list[tuple[list[int], str | None]],
        outputs: int = 6,
        chunk: int = 100,
        drafts: Sequence[tuple[int, ...]] = (),
        ahead: int = 0,
    ) -> list[Output]:
        """Run prompts with the named adapters in the same steps, `chunk` tokens of each at a time.

        drafts: guesses of each request's outputs after the first, all verified in one row. ahead: a draft head guesses
        so many tokens after each output, which the next row verifies.
        """
        params = SequenceParams(
            max_tokens=outputs, temperature=0.0, ignore_eos=True, logprobs=LISTED, prompt_logprobs=LISTED
        )
        each = NUM_BLOCKS // MAX_SEATS
        admitted = [
            Admission(
                str(seat),
                seat,
                prompt,
                len(prompt),
                params,
                0,
                (),
                tuple(range(seat * each, (seat + 1) * each)),
                adapter_slot=self.slots[name],
            )
            for seat, (prompt, name) in enumerate(requests)
        ]
        done = [0] * len(requests)
        found, made = [Output((), (), ()) for _ in requests], [tuple[int, ...]()] * len(requests)
        while any(len(output.tokens) < outputs for output in found):
            rows, seats = [], []
            for seat, (prompt, _) in enumerate(requests):
                known = len(prompt) + len(found[seat].tokens)
                if len(found[seat].tokens) < outputs:
                    count = min(chunk, known - done[seat])
                    sample = done[seat] + count == known
                    logits = count if done[seat] < len(prompt) else 1
                    guesses = drafts[seat] if drafts and len(found[seat].tokens) == 1 else made[seat]
                    count, logits = count + len(guesses), logits + len(guesses)
                    rows.append(Row(str(seat), seat, done[seat], count, logits, sample, done[seat], 0, (), guesses))
                    seats.append(seat)
                    done[seat] += count
            plan = StepPlan(0, rows, admitted, num_tokens=sum(row.count for row in rows))
            plan.num_drafts = sum(len(row.drafts) for row in rows)
            plan.ahead = tuple(ahead if row.sample else 0 for row in rows) if ahead else ()
            if self.built.facts.states is not None:
                plan.states = StateChanges(tuple(SlotChange(one.seat, one.seat) for one in admitted))
            results = self._step(plan)
            for seat, guessed in zip(seats, results.ahead, strict=False):
                made[seat] = guessed.token_ids
                self.guessed += len(guessed.token_ids)
            for seat, result in zip(seats, results.rows, strict=True):
                assert result.error is None, result.error
                old = found[seat]
                found[seat] = Output(
                    old.tokens + result.token_ids,
                    old.logprobs + (result.logprobs or ()),
                    old.prompt + (result.prompt_logprobs or ()),
                )
                if result.token_ids:  # tokens after a wrong draft are computed again
                    done[seat] = len(requests[seat][0]) + len(found[seat].tokens) - 1
            admitted = []
        self._step(StepPlan(0, [], released=list(range(len(requests)))))
        return found


def assert_close(found: Output, wanted: Output, bar: float = 2e-3) -> None:
    """Assert equal tokens, and equal log probabilities of tokens and of the prompt within `bar`."""
    assert found.tokens == wanted.tokens
    assert len(found.prompt) == len(wanted.prompt)
    for mine, others in zip(found.logprobs + found.prompt, wanted.logprobs + wanted.prompt, strict=True):
        assert abs(mine.logprob - others.logprob) < bar
        assert [token for token, _ in mine.top] == [token for token, _ in others.top] or bar > 1e-2
        for (_, one), (_, other) in zip(mine.top, others.top, strict=True):
            assert abs(one - other) < bar
