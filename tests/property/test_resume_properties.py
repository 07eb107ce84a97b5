"""Engines die repeatedly under random loads: each request ends as it would alone in an engine that lives."""

import random
from collections.abc import Iterator

from roseinfer.core.guide import GuideSpec
from roseinfer.core.outputs import FinishReason
from roseinfer.core.request import Prompt, RequestMeta, sequence_id
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Slo
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add, PriorOutput
from tests.helpers.cases import cases
from tests.helpers.engines import Collected, gather, make_core, run_dry
from tests.helpers.guides import ArithmeticGuides

LONGEST = 40


def engine(rng: random.Random) -> EngineCore:
    """Return an engine with room for any one of the requests, but not for all."""
    options = {
        "scheduling_policy": rng.choice(["fifo", "slack", "scorpio", "qoserve"]),
        "depth": rng.choice([1, 2]),
        "num_blocks": rng.choice([16, 24, 64]),
        "prefix_caching": rng.random() < 0.7,
        "max_num_seqs": rng.choice([2, 4, 8]),
        "max_num_batched_tokens": rng.choice([8, 32]),
        "enable_chunked_prefill": rng.random() < 0.8,
        "num_slots": rng.choice([0, 0, 1, 3, 12]),
    }
    return make_core(guides=ArithmeticGuides(), **options)


def requests(rng: random.Random) -> Iterator[Add]:
    head = [rng.randrange(50) for _ in range(6)]
    for number in range(rng.randrange(3, 9)):
        prompt = [*head[: rng.randrange(7)], *(rng.randrange(50) for _ in range(rng.randrange(1, 8)))]
        guide = rng.choice([None, None, GuideSpec(grammar=f"3,{rng.randrange(4, 20)},{rng.randrange(3)}")])
        longest = rng.randrange(1, LONGEST)
        params = SequenceParams(
            max_tokens=longest,
            min_tokens=0 if guide else min(longest, rng.choice([0, 5])),
            seed=rng.randrange(1000),
            frequency_penalty=rng.choice([0.0, 1.0]),
            logprobs=rng.choice([None, 0]),
            prompt_logprobs=rng.choice([None, None, 0]),
            stop_token_ids=() if guide else (7, 8),
            ignore_eos=guide is not None,
        )
        slo = rng.choice([None, Slo(ttft_s=1e6, tpot_s=1e3), Slo(e2e_s=1e7)])
        yield Add(f"r{number}", Prompt(prompt, params, RequestMeta(slo=slo), guide), rng.choice([1, 1, 3]))


def moved(new: Add, said: dict[str, Collected]) -> Add | None:
    """Return the request as the next engine gets it; None if it has ended."""
    samples = [said.get(sequence_id(new.request_id, index)) for index in range(new.n)]
    if not any(sample and (sample.tokens or sample.end) for sample in samples):
        return new
    outputs = [None if s and s.end else PriorOutput(list(s.tokens) if s else [], 0.1) for s in samples]
    if not any(outputs):
        return None
    return Add(new.request_id, new.prompt, new.n, outputs=outputs)


class Story:
    """Outputs of all requests over a sequence of engines."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.core = engine(rng)
        self.said: dict[str, Collected] = {}
        self.deaths = 0
        self._here: list[Add] = []

    def add(self, new: Add) -> None:
        self._here.append(new)
        self.core.add(new)

    def step(self) -> None:
        gather(self.core.step(), self.said)
        self.core.scheduler.check_integrity()

    def die(self) -> None:
        """Move open requests to another engine; the first one's steps in flight are lost."""
        assert self.core.stats().policy_faults == 0
        self.core, self.deaths = engine(self._rng), self.deaths + 1
        here, self._here = self._here, []
        for new in here:
            now = moved(new, self.said)
            if now is not None:
                for index in range(new.n):  # without output it starts again
                    one = self.said.get(sequence_id(new.request_id, index))
                    if one is not None and not one.tokens and not one.end:
                        one.prompt_logprobs.clear()
                self._here.append(new)
                self.core.add(now)


@cases("seed", range(12), exhaustive=range(12, 40))
def test_a_request_survives_engines(seed: int) -> None:
    rng = random.Random(seed)
    asked = list(requests(rng))
    story = Story(rng)
    for new in asked:
        story.add(new)
        for _ in range(rng.randrange(6)):
            story.step()
            if rng.random() < 0.15:
                story.die()
    for _ in range(rng.randrange(20)):
        story.step()
    story.die()
    run_dry(story.core, story.said)
    assert story.core.stats().policy_faults == 0 and story.deaths
    for new in asked:
        alone = make_core(guides=ArithmeticGuides())
        alone.add(new)
        for name, wanted in run_dry(alone).items():
            found = story.said[name]
            assert (found.tokens, found.reason) == (wanted.tokens, wanted.reason), name
            assert (found.logprobs, found.prompt_logprobs) == (wanted.logprobs, wanted.prompt_logprobs), name
            assert found.reason in (FinishReason.STOP, FinishReason.LENGTH)
