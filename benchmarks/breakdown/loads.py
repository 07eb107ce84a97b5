"""Steps to measure: a batch that decodes, or one beside which every step computes new prompts as well."""

import math
from collections.abc import Generator
from dataclasses import dataclass
from itertools import count

from roseinfer.bench.load import make_prompts
from roseinfer.core.plan import StepPlan
from roseinfer.core.request import sequence_id
from roseinfer.core.sampling import SamplingParams
from roseinfer.engine.llm import LLM
from roseinfer.engine.messages import Add

WARM_UP_STEPS = 16
# Of steps with prompts, which take long and hardly vary.
WARM_UP_PROMPT_STEPS = 2
SPARE_STEPS = 16
_DECODING = "decoding"


@dataclass(frozen=True, slots=True)
class Load:
    """`batch_size` requests that decode behind prompts of `input_len` tokens, and `prompt_tokens` a step of new prompts
    as long. `steps` are measured twice, without and with the profiler.
    """

    batch_size: int
    input_len: int
    steps: int
    seed: int
    prompt_tokens: int = 0

    @property
    def warm_up(self) -> int:
        return WARM_UP_PROMPT_STEPS if self.prompt_tokens else WARM_UP_STEPS

    @property
    def prompts(self) -> list[int]:
        """Lengths of the new prompts of a step."""
        whole, rest = divmod(self.prompt_tokens, self.input_len)
        return [self.input_len] * whole + [rest] * (rest > 0)

    @property
    def name(self) -> str:
        prompts = f" and {self.prompt_tokens} prompt tokens" if self.prompt_tokens else ""
        return f"batch {self.batch_size}{prompts}"

    def is_met(self, plan: StepPlan) -> bool:
        """Whether a step decodes the whole batch and computes whole new prompts."""
        decoding = sum(row.count == 1 and is_decoding(row.request_id) for row in plan.rows)
        rows, tokens = self.batch_size + len(self.prompts), self.batch_size + self.prompt_tokens
        return (decoding, len(plan.rows), plan.num_tokens) == (self.batch_size, rows, tokens)


def is_decoding(sequence: str) -> bool:
    """Whether a row of a plan is one of the batch's."""
    return sequence.startswith(_DECODING)


def steps_of(llm: LLM, load: Load) -> Generator[None, None, None]:
    """The engine's steps of `load`, one for each item, from the one on by which the whole batch has begun to decode."""
    core, scheduler = llm.core, llm.core.scheduler.config
    prefills = math.ceil(load.batch_size * load.input_len / scheduler.max_num_batched_tokens)
    wanted = load.warm_up + 2 * load.steps + 2 * prefills + SPARE_STEPS
    vocab = llm.info.vocab_size
    added: list[str] = []

    def add(name: str, prompt: list[int], outputs: int) -> None:
        core.add(Add(name, prompt, SamplingParams(max_tokens=outputs, temperature=0.0, ignore_eos=True)))
        added.append(sequence_id(name, 0))

    try:
        for number, prompt in enumerate(make_prompts(load.batch_size, load.input_len, vocab, load.seed)):
            add(f"{_DECODING}-{load.seed}-{number}", prompt, wanted)
        begun: set[str] = set()
        while core.busy and len(begun) < load.batch_size:
            begun.update(output.request_id for output in core.step() if output.token_ids)
        numbers = count()
        while core.busy or load.prompts:
            for length in load.prompts:
                number = next(numbers)
                (prompt,) = make_prompts(1, length, vocab, load.seed + (number << 16))
                add(f"prompt-{load.seed}-{number}", prompt, 1)
            core.step()
            yield
    finally:
        core.abort(added)
        while core.busy:
            core.step()
