"""Steps to measure: a batch that decodes, alone or with new prompts in every step."""

import math
from collections.abc import Generator
from dataclasses import dataclass

from roseinfer.bench.load import make_prompts
from roseinfer.core.adapters import Adapter
from roseinfer.core.errors import RoseinferError
from roseinfer.core.outputs import SequenceOutput
from roseinfer.core.plan import StepPlan
from roseinfer.core.request import Prompt, RequestMeta, sequence_id
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.local import LocalEngine
from roseinfer.engine.messages import Add

WARM_UP_STEPS = 16
# Steps with prompts take long and hardly vary.
WARM_UP_PROMPT_STEPS = 2
SPARE_STEPS = 16
_DECODING = "decoding"
_APART = 1 << 20  # larger than any part of a seed


class UnsteadyError(RoseinferError):
    """The batch did not decode as a whole for long enough."""


@dataclass(frozen=True, slots=True)
class Load:
    """Decoding requests after prompts, and new prompts in each step.

    batch_size: decoding requests with prompts of `input_len` tokens. prompt_tokens: tokens of new prompts per step, of
    the same length. steps: measured twice, without and with the profiler. Batches of the same seed are equal, and find
    their prompts cached. adapted_rows: requests of the batch that use the engine's adapters, if it has any; None = all.
    New prompts use the first adapter, unless there are 0.
    """

    batch_size: int
    input_len: int
    steps: int
    seed: int
    prompt_tokens: int = 0
    adapted_rows: int | None = None

    @property
    def warm_up(self) -> int:
        return WARM_UP_PROMPT_STEPS if self.prompt_tokens else WARM_UP_STEPS

    @property
    def prompts(self) -> list[int]:
        """Return the lengths of the new prompts of a step."""
        whole, rest = divmod(self.prompt_tokens, self.input_len)
        return [self.input_len] * whole + [rest] * (rest > 0)

    @property
    def name(self) -> str:
        prompts = f" and {self.prompt_tokens} prompt tokens" if self.prompt_tokens else ""
        return f"batch {self.batch_size}{prompts}"

    def is_met(self, plan: StepPlan) -> bool:
        """Return True if a step decodes the whole batch and computes whole new prompts."""
        decoding = sum(row.count == 1 and is_decoding(row.request_id) for row in plan.rows)
        rows, tokens = self.batch_size + len(self.prompts), self.batch_size + self.prompt_tokens
        return (decoding, len(plan.rows), plan.num_tokens) == (self.batch_size, rows, tokens)


def is_decoding(sequence: str) -> bool:
    """Return True if a row of a plan belongs to the batch."""
    return sequence.startswith(_DECODING)


def steps_of(engine: LocalEngine, load: Load) -> Generator[None, None, None]:
    """Run the engine's steps of `load`, one per item, once the whole batch decodes.

    The items cover warm-up and measured steps; there are fewer if the engine ends the batch. Raise `UnsteadyError` if a
    request of the batch fails.
    """
    core, scheduler = engine.core, engine.core.scheduler.config
    prefills = math.ceil(load.batch_size * load.input_len / scheduler.max_num_batched_tokens)
    wanted = load.warm_up + 2 * load.steps + 2 * prefills + SPARE_STEPS
    vocab = engine.info.facts.vocab_size
    added: list[str] = []

    adapters = list(engine.adapters().values()) if load.adapted_rows != 0 else []

    def add(name: str, prompt: list[int], outputs: int, adapter: Adapter | None) -> None:
        params = SequenceParams(max_tokens=outputs, temperature=0.0, ignore_eos=True)
        core.add(Add(name, Prompt(prompt, params, RequestMeta(adapter=adapter))))
        added.append(sequence_id(name, 0))

    try:
        for number, prompt in enumerate(make_prompts(load.batch_size, load.input_len, vocab, load.seed)):
            adapted = adapters and (load.adapted_rows is None or number < load.adapted_rows)
            adapter = adapters[number % len(adapters)] if adapted else None
            add(f"{_DECODING}-{load.seed}-{number}", prompt, wanted, adapter)
        begun: set[str] = set()
        while core.busy and len(begun) < load.batch_size:
            begun.update(output.request_id for output in _checked(core.step()) if output.token_ids)
        for step, prompts in enumerate(_new_prompts(load, vocab)):
            for number, prompt in enumerate(prompts):
                add(f"prompt-{step}-{number}", prompt, 1, adapters[0] if adapters else None)
            if not core.busy:
                return
            _checked(core.step())
            yield
    finally:
        core.abort(added)
        while core.busy:
            core.step()


def _checked(outputs: list[SequenceOutput]) -> list[SequenceOutput]:
    """Return the outputs of a step in which no request of the batch has failed."""
    for output in outputs:
        if output.end is not None and output.end.error is not None and is_decoding(output.request_id):
            raise UnsteadyError(f"request {output.request_id}: {output.end.error}")
    return outputs


def _new_prompts(load: Load, vocab: int) -> list[list[list[int]]]:
    """Return the new prompts of each step, made in advance. No two loads share one, or it would be cached."""
    steps = range(load.warm_up + 2 * load.steps)
    seeds = [((load.seed * _APART + load.batch_size) * _APART + load.prompt_tokens) * _APART + step for step in steps]
    lengths = load.prompts
    found = [make_prompts(len(lengths), load.input_len, vocab, seed) for seed in seeds]
    return [[prompt[:length] for prompt, length in zip(prompts, lengths, strict=True)] for prompts in found]
