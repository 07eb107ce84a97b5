"""`LLM` with the embedded model."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from roseinfer import LLM, SamplingParams, StructuredOutputsParams
from roseinfer.core.errors import (
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    RequestTooLongError,
)
from roseinfer.core.guide import GuideSpec
from roseinfer.core.outputs import FinishReason, SequenceOutput
from roseinfer.core.request import Prompt
from roseinfer.core.slo import Cause, Slo
from roseinfer.engine.api import GenerateRequest
from roseinfer.engine.core import IDLE_TURN_WAIT_S
from roseinfer.engine.messages import Add, PriorOutput
from tests.helpers.engine_info import engine_info
from tests.helpers.engines import make_core

GREEDY = SamplingParams(max_tokens=24, temperature=0.0)


def request(llm: LLM, prompt: str, name: str) -> GenerateRequest:
    """Return a greedy request for the engine."""
    ids = llm.engine.tokenizer.encode(prompt)
    return GenerateRequest(request_id=name, prompt=Prompt(ids, GREEDY.for_sequence(max_tokens=0)))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", num_kv_blocks=256, max_num_seqs=8, threads=1) as engine:
        yield engine
        engine.engine.core.scheduler.check_integrity()
        assert engine.engine.core.scheduler.num_live == 0


def test_it_writes_python(llm: LLM) -> None:
    text = llm.generate("def fibonacci(", SamplingParams(max_tokens=80, temperature=0.0))[0].outputs[0].text
    assert "):" in text
    assert "return" in text or '"""' in text


def test_a_batch_gives_what_each_prompt_gives_alone(llm: LLM) -> None:
    prompts = ["import os\n", "class Queue:\n", "def main(", "for line in "]
    together = [answer.outputs[0].token_ids for answer in llm.generate(prompts, GREEDY)]
    alone = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in prompts]
    assert together == alone


def test_streamed_text_adds_up_to_the_completion(llm: LLM) -> None:
    whole = llm.generate("def main(", GREEDY)[0].outputs[0]
    chunks = list(llm.stream("def main(", GREEDY))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [i for chunk in chunks for i in chunk.token_ids] == whole.token_ids
    assert chunks[-1].finish_reason == whole.finish_reason


def test_each_sample_reports_what_it_waited_for(llm: LLM) -> None:
    first, second = llm.generate("def area(", SamplingParams(n=2, max_tokens=4, ignore_eos=True))[0].outputs
    assert first.why is not None and second.why is not None
    assert Cause.PARENT in dict(second.why.waited) and Cause.PARENT not in dict(first.why.waited)
    assert (first.why.steps, first.why.sat_out) == (second.why.steps, second.why.sat_out) == (4, 0)


def test_leaving_a_stream_early_frees_it(llm: LLM) -> None:
    stream = llm.stream("def main(", SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
    next(stream)
    with pytest.raises(InvalidRequestError, match="another call"):
        llm.generate("x", GREEDY)
    stream.close()
    assert llm.engine.core.scheduler.num_live == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_closing_ends_a_stream_that_is_under_way(overlap: bool) -> None:
    llm = LLM("tiny", num_kv_blocks=20, overlap=overlap, threads=1)
    stream, left = (llm.stream("def main(", SamplingParams(max_tokens=40, ignore_eos=True)) for _ in range(2))
    next(stream)
    llm.close()
    for each in (stream, left):
        with pytest.raises(EngineClosedError):
            next(each)


def test_steps_bring_the_chunks_of_all_prompts(llm: LLM) -> None:
    prompts = ["import os\n", "def main("]
    whole = [answer.outputs[0].token_ids for answer in llm.generate(prompts, GREEDY)]
    seen: list[list[int]] = [[], []]
    requests = [request(llm, prompt, str(i)) for i, prompt in enumerate(prompts)]
    for chunks in llm.engine.run(requests):
        assert len(chunks) <= len(prompts)
        for number, chunk in chunks:
            seen[number] += chunk.token_ids
    assert seen == whole
    steps = llm.engine.run(requests)
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    assert not llm.engine.core.busy


def test_an_interrupted_call_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("roseinfer.llm.answers.AnswerBuilder.take", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["def main(", "import "], GREEDY)
    assert llm.engine.core.scheduler.num_live == 0
    assert llm.generate("def main(", GREEDY)[0].outputs[0].text


def test_samples_differ_and_seeds_repeat(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=16, temperature=1.0, seed=11)
    first = llm.generate("def ", params)[0]
    assert len({output.text for output in first.outputs}) == 3
    again = llm.generate(["import ", "def ", "class "], params)[1]
    assert [output.token_ids for output in again.outputs] == [output.token_ids for output in first.outputs]


def test_a_stop_string_ends_a_stream_with_its_times(llm: LLM) -> None:
    whole = llm.generate("import os\n", GREEDY)[0].outputs[0].text
    params = SamplingParams(max_tokens=24, temperature=0.0, stop=(whole[8:12],))
    last = list(llm.stream("import os\n", params))[-1]
    assert last.finish_reason is FinishReason.STOP and last.times is not None
    assert 0 < last.times.arrival_s <= last.times.scheduled_s <= last.times.first_token_s <= last.times.finished_s


def test_idle_turns_do_not_make_a_busy_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy plans nothing in its first turns."""
    core, held_back_turns, slept = make_core(), 5, list[float]()
    plan, asked = core.scheduler.plan, itertools.count(1)
    monkeypatch.setattr(core.scheduler, "plan", lambda now_s: None if next(asked) <= held_back_turns else plan(now_s))
    monkeypatch.setattr("roseinfer.engine.build.build_engine", lambda *args: (core, engine_info(max_model_len=64)))
    monkeypatch.setattr("roseinfer.engine.local.time.sleep", slept.append)
    with LLM("tiny") as idle_turn:
        (completion,) = idle_turn.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(completion.outputs[0].token_ids) == 4
    assert slept == [IDLE_TURN_WAIT_S] * held_back_turns


def test_output_that_cannot_be_decoded_ends_only_its_sequence(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fine, broken = (answer.outputs[0].token_ids for answer in llm.generate(["import os\n", "class "], GREEDY))
    planted = next(token for token in broken if token not in fine)
    token_bytes = llm.engine.tokenizer.token_bytes

    def poor(id: int) -> bytes:
        if id == planted:
            raise LookupError("planted detokeniser error")
        return token_bytes(id)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.tokenizer, "token_bytes", poor)
        first, second = (answer.outputs[0] for answer in llm.generate(["import os\n", "class "], GREEDY))
    assert first.token_ids == fine and first.error is None
    assert second.finish_reason is FinishReason.ERROR
    assert "cannot decode the output: LookupError" in (second.error or "")
    assert llm.engine.core.scheduler.num_live == 0 and "planted" in caplog.text


def test_stop_strings_and_log_probabilities(llm: LLM) -> None:
    whole = llm.generate("import os\n", GREEDY)[0].outputs[0].text
    stop = whole[8:12]
    params = SamplingParams(max_tokens=24, temperature=0.0, stop=(stop,), logprobs=2, prompt_logprobs=1)
    answer = llm.generate("import os\n", params)[0]
    sample = answer.outputs[0]
    assert sample.text == whole[: whole.index(stop)]
    assert (sample.finish_reason, sample.stop_reason) == (FinishReason.STOP, stop)
    assert [next(iter(entry)) for entry in sample.logprobs or []] == sample.token_ids
    assert all([found.rank for found in entry.values()] == [1, 2] for entry in sample.logprobs or [])
    scored = answer.prompt_logprobs or []
    assert scored[0] is None
    assert [next(iter(entry)) for entry in scored[1:] if entry] == answer.prompt_token_ids[1:]


def test_bad_words_do_not_appear(llm: LLM) -> None:
    prompts = ["import os\n", "def main("]
    for prompt, whole in zip(
        prompts, (answer.outputs[0].text for answer in llm.generate(prompts, GREEDY)), strict=True
    ):
        words = [word for word in whole.split() if word.isalpha()]
        assert words
        word = max(words, key=len)
        banned = SamplingParams(max_tokens=24, temperature=0.0, bad_words=(word,))
        text = llm.generate(prompt, banned)[0].outputs[0].text
        assert text != whole and f" {word} " not in f" {text} "
    with pytest.raises(InvalidRequestError, match="bad_words"):
        llm.generate("x", SamplingParams(bad_words=("\ud800",)))


def test_allowed_tokens_are_the_only_ones(llm: LLM) -> None:
    allowed = tuple(sorted({*llm.engine.tokenizer.encode("def return self pass\n")}))
    params = SamplingParams(n=3, max_tokens=24, temperature=1.0, seed=3, allowed_token_ids=allowed, logprobs=0)
    for sample in llm.generate("def main(", params)[0].outputs:
        assert set(sample.token_ids) <= set(allowed)
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        llm.generate("x", SamplingParams(allowed_token_ids=(llm.engine.info.facts.vocab_size,)))


@pytest.fixture
def short_context() -> Iterator[LLM]:
    with LLM("tiny", max_model_len=256, num_kv_blocks=64, threads=1) as engine:
        yield engine


def test_long_prompts_are_cut_at_their_start_when_asked(short_context: LLM) -> None:
    llm, context = short_context, short_context.engine.info.facts.max_model_len
    text = "x = 1\n" * context
    whole = llm.engine.tokenizer.encode(text)
    with pytest.raises(RequestTooLongError):
        llm.generate(text, GREEDY)
    for truncate, kept in ((10, 10), (-1, context - GREEDY.max_tokens)):
        params = replace(GREEDY, truncate_prompt_tokens=truncate)
        for answer in llm.generate([text, whole], params):
            assert len(answer.prompt_token_ids) == kept
            assert answer.prompt_token_ids[1:] == whole[1 - kept :] and len(answer.outputs[0].token_ids) > 0
    short = llm.generate("import os", replace(GREEDY, truncate_prompt_tokens=100))[0]
    assert short.prompt_token_ids == llm.engine.tokenizer.encode("import os")
    with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens"):
        llm.generate("x", replace(GREEDY, truncate_prompt_tokens=context + 1))
    (chat,) = llm.chat([{"role": "user", "content": text}], replace(GREEDY, truncate_prompt_tokens=20))
    assert len(chat.prompt_token_ids) == 20


def test_chat_goes_through_the_template(llm: LLM) -> None:
    (answer,) = llm.chat([{"role": "user", "content": "Write a Python function that adds two numbers."}], GREEDY)
    assert answer.prompt_token_ids[0] in llm.engine.tokenizer.special_ids
    assert answer.prompt is not None and "<|user|>Write a Python" in answer.prompt
    assert answer.outputs[0].token_ids


NAMES = StructuredOutputsParams(grammar='start: "def " /[a-z]{3,6}/ "(" /[a-z]/ ("," /[a-z]/){0,2} "):"')


def test_an_output_follows_its_guide_and_others_do_not(llm: LLM) -> None:
    prompts = ["# a function\n", "# another\n"]
    plain = SamplingParams(n=2, max_tokens=24, temperature=1.0, seed=5)
    named = replace(plain, structured_outputs=NAMES)
    guided, free = llm.generate(prompts, [named, plain])
    for sample in guided.outputs:
        assert re.fullmatch(r"def [a-z]{3,6}\([a-z](,[a-z]){0,2}\):", sample.text)
        assert sample.finish_reason is FinishReason.STOP
    assert free.outputs[0].token_ids == llm.generate(prompts[1], plain)[0].outputs[0].token_ids
    again = llm.generate(prompts[0], named)[0]
    assert [s.token_ids for s in again.outputs] == [s.token_ids for s in guided.outputs] and again.num_cached_tokens


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=20, temperature=0.0, logprobs=1),
        SamplingParams(max_tokens=20, temperature=0.9, seed=7, top_p=0.9, ignore_eos=True),
        SamplingParams(max_tokens=20, seed=8, presence_penalty=1.5, frequency_penalty=1.0),
        SamplingParams(max_tokens=20, seed=9, repetition_penalty=1.3, min_tokens=15, prompt_logprobs=0),
        SamplingParams(max_tokens=20, seed=10, structured_outputs=NAMES),
    ],
)
def test_outputs_that_another_engine_began_continue_the_same(llm: LLM, params: SamplingParams) -> None:
    (whole,) = llm.generate("def main(", params)
    (sample,) = whole.outputs
    guide = None if params.structured_outputs is None else GuideSpec(grammar=str(NAMES.grammar))
    prompt = Prompt(whole.prompt_token_ids, params.for_sequence(max_tokens=0), guide=guide)
    for cut in (1, len(sample.token_ids) // 2, len(sample.token_ids) - 1):
        said = PriorOutput(sample.token_ids[:cut], 0.5)
        llm.engine.core.add(Add(f"on {cut}", prompt, outputs=[said]))
        more: list[SequenceOutput] = []
        while llm.engine.core.busy:
            more += llm.engine.core.step()
        assert said.token_ids + [token for output in more for token in output.token_ids] == sample.token_ids
        assert more[-1].end is not None and more[-1].end.reason is sample.finish_reason
        assert not any(output.prompt_logprobs or output.started for output in more)
        if sample.logprobs is not None:
            scores = [entry.logprob for output in more for entry in output.logprobs or ()]
            expected = [next(iter(entry.values())).logprob for entry in sample.logprobs[cut:]]
            assert scores == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("more", [{}, {"ignore_eos": True}, {"min_tokens": 20}, {"logprobs": 2, "temperature": 0.0}])
def test_a_finished_grammar_ends_an_output_under_any_other_parameters(llm: LLM, more: dict[str, Any]) -> None:
    outputs = StructuredOutputsParams(grammar='start: "pass" "!"?')
    params = SamplingParams(max_tokens=24, structured_outputs=outputs, **more)
    (sample,) = llm.generate("def main():\n", params)[0].outputs
    assert sample.text in ("pass", "pass!") and sample.finish_reason is FinishReason.STOP
    if more.get("logprobs"):
        assert len(sample.logprobs) == len(sample.token_ids)


def test_a_guide_and_allowed_tokens_that_leave_nothing_end_only_that_output(llm: LLM) -> None:
    (colon,) = llm.engine.tokenizer.encode(":", add_special_tokens=False)
    free = SamplingParams(max_tokens=24, structured_outputs=NAMES)
    wrong, right = llm.generate(["x", "x"], [replace(free, allowed_token_ids=[colon]), free])
    assert wrong.outputs[0].finish_reason is FinishReason.ERROR
    assert "the output's constraint forbids all" in (wrong.outputs[0].error or "")
    assert right.outputs[0].finish_reason is FinishReason.STOP


def test_a_grammar_that_does_not_compile_is_an_error_and_leaves_nothing(llm: LLM) -> None:
    wrong = replace(GREEDY, structured_outputs=StructuredOutputsParams(grammar="start: nothing"))
    with pytest.raises(InvalidRequestError, match=r"prompts\[1\]: structured_outputs: .*unknown name"):
        llm.generate(["x", "y"], [GREEDY, wrong])
    assert llm.engine.core.scheduler.num_live == 0 and not llm.engine.core.busy


def test_with_one_invalid_request_nothing_runs(llm: LLM) -> None:
    context = f"This model's maximum context length is {llm.engine.info.facts.max_model_len} tokens"
    with pytest.raises(RequestTooLongError, match=f"^{context}. .*the prompt has 5000 tokens"):
        llm.generate([[1] * 5000], GREEDY)
    with pytest.raises(RequestTooLongError, match=rf"^prompts\[1\]: {context}. .*the prompt has 5000 tokens"):
        llm.generate(["fine", [1] * 5000], GREEDY)
    with pytest.raises(InvalidRequestError, match=r"prompts\[2\]: .*vocabulary"):
        llm.generate(["fine", "fine", [1, 10**6]], GREEDY)
    with pytest.raises(InvalidRequestError, match="sampling_params has 2 entries for 1 prompts"):
        llm.generate("x", [GREEDY, GREEDY])
    assert not llm.engine.core.busy


@pytest.mark.parametrize("wrong", ["a", None, 1.5, [1]])
def test_a_prompt_with_an_invalid_token_is_rejected_and_leaves_nothing(llm: LLM, wrong: object) -> None:
    with pytest.raises(InvalidRequestError, match="a list of token ids") as caught:
        llm.generate([[1, 2, 3], [1, wrong]], GREEDY)
    assert caught.value.param == "prompt"
    assert llm.engine.core.scheduler.num_live == 0
    assert llm.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids


def test_a_failure_while_prompts_are_queued_leaves_none_of_them_behind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, left = llm.engine.core.add, iter([True, False])

    def fails_at_the_second(new: object) -> None:
        if not next(left):
            raise KeyboardInterrupt
        add(new)

    monkeypatch.setattr(llm.engine.core, "add", fails_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3], [1, 2]], GREEDY)
    assert llm.engine.core.scheduler.num_live == 0 and not llm.engine.core.busy


def test_unknown_options_are_rejected() -> None:
    with pytest.raises(ConfigError, match="max_seqs"):
        LLM("tiny", max_seqs=4)


def test_a_model_of_another_type_is_rejected() -> None:
    with pytest.raises(ConfigError, match="model must be text or a path, got None"):
        LLM(None)


def test_objectives_without_a_server(llm: LLM) -> None:
    kept, away = Slo(ttft_s=100.0, tpot_s=10.0), Slo(ttft_s=1e-6)
    (sample,) = llm.generate("def main(", GREEDY, slo=kept)[0].outputs
    assert sample.token_ids == llm.generate("def main(", GREEDY)[0].outputs[0].token_ids
    assert sample.finish_reason is FinishReason.LENGTH and sample.rejection is None
    for sample in llm.generate("def main(", replace(GREEDY, n=2), slo=away)[0].outputs:
        assert sample.finish_reason is FinishReason.REJECTED and not sample.text
        assert sample.rejection is not None and sample.rejection.hopeless


def test_later_calls_fail_after_an_interrupt_during_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The resources of the interrupted step are lost. Without the error, later calls would wait for its seats
    forever.
    """
    with LLM("tiny", num_kv_blocks=64, max_num_seqs=2, threads=1) as engine:

        def interrupted(handle: object) -> object:
            raise KeyboardInterrupt

        monkeypatch.setattr(engine.engine.core.runner, "collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(["a", "b"], GREEDY)
        monkeypatch.undo()
        with pytest.raises(EngineDeadError, match="create a new one"):
            engine.generate("c", GREEDY)
