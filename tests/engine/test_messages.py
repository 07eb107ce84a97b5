"""Messages between engine and client are the same after encoding and decoding."""

import msgspec
import pytest

from roseinfer.core.guide import GuideSpec, Thinking, Trigger
from roseinfer.core.outputs import (
    DraftRun,
    DraftStats,
    End,
    FinishReason,
    PolicyStats,
    RequestTimes,
    SchedulerStats,
    SequenceOutput,
)
from roseinfer.core.pooling import PairFormat, PoolingInfo, PoolingMethod, PoolingParams, PoolingTask
from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.api import StepRecord
from roseinfer.engine.messages import Add, ClientMessage, EngineMessage, Heartbeat, Outputs, Ready
from roseinfer.engine.pooling import pooling_prompt
from tests.helpers.engine_info import engine_info
from tests.helpers.writing import framing


@pytest.mark.parametrize(
    "policy",
    [
        None,
        PolicyStats(),
        PolicyStats(speed=1.08, virtual_batch_size=11 / 6, predicted_step_s=0.02),
        PolicyStats(0.9, 1.08, 0.02, 0.03, 11 / 6, 2, 0.02),
    ],
)
def test_figures_of_the_policy_and_predictions_of_steps(policy: PolicyStats | None) -> None:
    stats, steps = SchedulerStats(step=3, steps_done=2, policy=policy), [StepRecord(5, 0.01, 0.02), StepRecord(1, 0.01)]
    for message in (Outputs([SequenceOutput("a:0", (1,))], stats, 1.0, steps), Heartbeat(stats, 1.0, steps)):
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=EngineMessage)
        assert sent == message
        assert isinstance(sent.stats, SchedulerStats) and sent.steps[0].predicted_s == 0.02


def test_drafts_of_a_row_and_their_counts() -> None:
    output = SequenceOutput("a:0", (1, 2, 3), drafts=(DraftRun("forced", 1), DraftRun("ngram", 4)))
    stats = SchedulerStats(drafts=(DraftStats("ngram", 3, (3, 2), (2, 0)), DraftStats("forced", 1, (1,), (1,))))
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(Outputs([output], stats, 1.0)), type=EngineMessage)
    assert read == Outputs([output], stats, 1.0)
    assert isinstance(read.outputs[0].drafts[0], DraftRun) and isinstance(read.stats.drafts[0], DraftStats)


def test_what_constrains_an_output() -> None:
    thinking = Thinking(inside=True, begin=(7,), end=(8, 9), budget=3, last_words=(5, 8, 9))
    triggers = (Trigger(grammar="start: /b/", token_id=4), Trigger(grammar="start: /c/", text="<f>", at_start=True))
    spec = GuideSpec(grammar="start: /é/", triggers=triggers, ends_after=2, banned=(1,), thinking=thinking)
    for guide in (None, GuideSpec(), spec, GuideSpec(framing=framing(budget=3), grammar="start: /d/")):
        sent = Add("a", Prompt([1], SequenceParams(), guide=guide))
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=ClientMessage) == sent


def test_vectors_and_their_description() -> None:
    sent: Add | Ready | Outputs = Add("a", pooling_prompt([1], pooling=PoolingParams(dimensions=8, second_text_from=1)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=ClientMessage) == sent
    info = PoolingInfo(
        task=PoolingTask.SCORE,
        method=PoolingMethod.CLS,
        width=1,
        dimensions=(1,),
        prompts={"query": "find: "},
        default_prompt="query",
        pairs=PairFormat.TOKENIZER,
    )
    end = End(FinishReason.STOP, RequestTimes(0.0, 0.0, 0.0, 0.0), vector=bytes(range(256)))
    for sent in (Ready(engine_info(pooling=info)), Outputs([SequenceOutput("a:0", end=end)], SchedulerStats(), 1.0)):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=EngineMessage) == sent
