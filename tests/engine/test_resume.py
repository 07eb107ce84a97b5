"""A request that continues from another engine ends as if nothing had interrupted it."""

import random
from pathlib import Path

import pytest

from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.guide import GuideSpec, Thinking, Trigger
from roseinfer.core.outputs import FinishReason
from roseinfer.core.request import NO_META, Prompt, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Slo
from roseinfer.engine.core import EngineCore
from roseinfer.engine.guided.guides import GuidedSequences
from roseinfer.engine.messages import Add, PriorOutput
from roseinfer.engine.record import RecordingCore, engine_recorder
from roseinfer.kv import blocks
from roseinfer.kv.blocks import block_keys
from roseinfer.sim.replay import read_recording, replay
from tests.helpers.cases import cases
from tests.helpers.drafters import Oracle
from tests.helpers.engines import Collected, add, assert_empty, gather, make_core, run_dry, submitted
from tests.helpers.fake_runner import FakeRunner
from tests.helpers.guides import ArithmeticGuides
from tests.helpers.tokenizers import EOS_ID
from tests.helpers.writing import CALL, PAIR, THINK, THOUGHT, VOCAB, Writing, framing, grammar_guides

PROMPT = [5, 9, 2, 7, 11, 30, 8, 4, 17, 21]
OUTPUTS = 14

REQUESTS = {
    "plain": SequenceParams(max_tokens=OUTPUTS, seed=4, ignore_eos=True),
    "eos": SequenceParams(max_tokens=36, seed=16),
    "penalties": SequenceParams(max_tokens=OUTPUTS, seed=5, ignore_eos=True, frequency_penalty=1.0),
    "min_tokens": SequenceParams(max_tokens=36, min_tokens=9, stop_token_ids=tuple(range(25)), seed=3),
    "logprobs": SequenceParams(max_tokens=OUTPUTS, seed=4, ignore_eos=True, logprobs=0, prompt_logprobs=0),
    "edits": SequenceParams(
        max_tokens=OUTPUTS, seed=8, ignore_eos=True, allowed_token_ids=(3, 4, 5), bad_token_ids=((3, 4), (5,))
    ),
}
GUIDED = {  # modulus, length, and how many tokens it leaves free
    "grammar": "3,9,0",
    "trigger": "3,12,5",
    "longer": "3,40,2",
}
ENGINES: dict[str, dict[str, object]] = {
    "depth 1": {"depth": 1},
    "depth 2": {"depth": 2},
    "no prefix cache": {"depth": 2, "prefix_caching": False},
    "chunks": {"depth": 2, "max_num_batched_tokens": 4},
    "whole prompts": {"depth": 1, "enable_chunked_prefill": False},
    "preempted": {"depth": 2, "num_blocks": 12},
    "drafts": {"depth": 2},  # see `continuing`
}


def engine(**options: object) -> EngineCore:
    return make_core(guides=ArithmeticGuides(), **options)


def continuing(kind: str, whole: dict[str, Collected]) -> EngineCore:
    """Return an engine that continues a request, whose outputs are `whole`."""
    drafter = Oracle({name: one.tokens for name, one in whole.items()}, 50, right=0.7) if kind == "drafts" else None
    return engine(**ENGINES[kind], drafter=drafter)


def run(core: EngineCore, new: Add, *, beside: int = 0) -> dict[str, Collected]:
    """Return the core's output of a request, with other requests that preempt it."""
    core.add(new)
    for number in range(beside):
        add(core, f"other{number}", [number + 1] * 6, max_tokens=18, ignore_eos=True, seed=number)
    said = run_dry(core)
    return {name: one for name, one in said.items() if name.startswith(f"{new.request_id}:")}


def asked(name: str, n: int = 1, meta: RequestMeta = NO_META, **fields: object) -> Add:
    guide = GuideSpec(grammar=GUIDED[name]) if name in GUIDED else None
    return Add("a", Prompt(PROMPT, REQUESTS.get(name, REQUESTS["plain"]), meta, guide), n, **fields)


@cases("stride", [3], exhaustive=[1])
@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("name", [*REQUESTS, *GUIDED])
def test_a_resumed_request_has_the_same_output(name: str, kind: str, stride: int) -> None:
    """Outputs are interrupted after each token, or after each third one."""
    whole = run(engine(), asked(name))["a:0"]
    drafted = 0
    assert len(whole.tokens) > 8
    for cut in range(1, min(len(whole.tokens), 24), stride):
        said = PriorOutput(whole.tokens[:cut], 0.25)
        core = continuing(kind, {"a:0": whole})
        rest = run(core, asked(name, outputs=[said]), beside=4 if kind == "preempted" else 0)["a:0"]
        assert said.token_ids + rest.tokens == whole.tokens, f"interrupted behind {cut} tokens"
        assert rest.logprobs == whole.logprobs[cut:] and not rest.prompt_logprobs
        assert rest.end is not None and whole.end is not None
        assert (rest.reason, rest.end.stop_token) == (whole.reason, whole.end.stop_token)
        assert rest.end.times.first_token_s == rest.end.times.arrival_s + 0.25
        drafted += sum(plan.num_drafts for plan in submitted(core))
    assert bool(drafted) == (kind == "drafts")


def test_some_are_preempted_once_more() -> None:
    """Otherwise the engine with few blocks would show nothing."""
    core = engine(**ENGINES["preempted"])
    run(core, asked("plain", outputs=[PriorOutput([1, 2, 3], 0.0)]), beside=4)
    assert core.scheduler.stats().preemptions


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("name", ["eos", "logprobs", "trigger"])
def test_each_sample_continues_where_it_was(name: str, kind: str) -> None:
    """Ended samples are not requested, and samples without output start."""
    whole = run(engine(), asked(name, 4))
    rng = random.Random(kind)
    for _ in range(6):
        said: list[PriorOutput | None] = []
        for index in range(4):
            tokens = whole[f"a:{index}"].tokens
            ended = rng.random() < 0.3
            said.append(None if ended else PriorOutput(tokens[: rng.randrange(len(tokens))], 0.5))
        if not any(said):
            continue
        rest = run(continuing(kind, whole), asked(name, 4, outputs=said))
        assert set(rest) == {f"a:{index}" for index, one in enumerate(said) if one is not None}
        for index, one in enumerate(said):
            if one is not None:
                assert one.token_ids + rest[f"a:{index}"].tokens == whole[f"a:{index}"].tokens
                assert rest[f"a:{index}"].reason == whole[f"a:{index}"].reason


@pytest.mark.parametrize("depth", [1, 2])
def test_counts_include_only_tokens_computed_here(depth: int) -> None:
    core = engine(depth=depth)
    run(core, asked("plain", outputs=[PriorOutput(list(range(10, 16)), 0.0)]))
    stats = core.scheduler.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (0, OUTPUTS - 6), "its prompt was counted where it began"
    first = submitted(core)[0]
    assert (first.num_tokens, first.rows[0].count) == (16, 16)
    run(core, asked("plain"))
    stats = core.scheduler.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (1, 2 * OUTPUTS - 6), "all but its last are cached"


def test_resumed_outputs_share_cached_blocks() -> None:
    core = engine()
    whole = run(core, asked("plain"))["a:0"]
    run(core, asked("plain", outputs=[PriorOutput(whole.tokens[:10], 0.0)]))
    resumed = submitted(core)[-(OUTPUTS - 10) :][0]
    assert (resumed.rows[0].start, resumed.rows[0].count) == (19, 1), "five blocks are there from the first time"


@pytest.mark.parametrize("policy", ["fifo", "slack", "scorpio", "qoserve"])
def test_a_resumed_request_precedes_new_ones_and_is_not_rejected(policy: str) -> None:
    core = engine(scheduling_policy=policy, max_num_seqs=1)
    add(core, "busy", [1, 2, 3], max_tokens=4, ignore_eos=True)
    core.step()
    for number in range(3):
        add(core, f"new{number}", [1, 2, 3], max_tokens=4, ignore_eos=True)
    hopeless = RequestMeta(slo=Slo(ttft_s=1e-6, tpot_s=10.0))
    core.add(asked("plain", n=2, meta=hopeless, age_s=9.0, outputs=[PriorOutput([4, 5], 0.1), PriorOutput([], 0.0)]))
    said: dict[str, Collected] = {}
    order = []
    while core.busy:
        outputs = core.step()
        order += [output.request_id for output in outputs]
        gather(outputs, said)
    assert_empty(core)
    assert {one.reason for one in said.values()} == {FinishReason.LENGTH}
    if policy != "qoserve":  # it serves requests with missed deadlines last, new or not
        assert order.index("a:0") < order.index("new0:0")
    assert core.stats().policy_faults == 0


def test_token_deadlines_continue() -> None:
    """A request that is late for its next token comes before a new one."""
    core = engine(scheduling_policy="slack")
    core.clock.advance(100.0)
    slo = RequestMeta(slo=Slo(ttft_s=1.0, tpot_s=0.5))
    core.add(asked("plain", meta=slo, age_s=3.0, outputs=[PriorOutput([4, 5, 6], 0.5)]))
    state = core.scheduler.policy.state
    track = state.ledger.waiting["a:0"]
    pace_s = 0.5 * (1 - state.margins.of(0.5))
    assert track.due_s == pytest.approx(100.0 - 3.0 + 0.5 + 3 * pace_s)
    assert state.promised == 1 and track.length > 3
    assert run_dry(core)["a:0"].reason is FinishReason.LENGTH
    assert state.promised == 0 and not state.preempted


def test_a_request_that_cannot_continue_is_rejected_and_no_other_ends() -> None:
    core = engine()
    plain = [4, 5]
    wrong = [
        [],
        [None],
        [PriorOutput(plain, 0.0), None],
        [PriorOutput([4, 50], 0.0)],
        [PriorOutput([-1], 0.0)],
        [PriorOutput(list(range(OUTPUTS)), 0.0)],
    ]
    for outputs in wrong:
        with pytest.raises(InvalidRequestError) as caught:
            core.add(asked("plain", outputs=outputs))
        assert caught.value.param == "outputs"
    with pytest.raises(InvalidRequestError):
        core.add(asked("eos", outputs=[PriorOutput([4, 3], 0.0)]))
    assert not core.suspects(), "what was refused is no suspect"
    core.add(asked("plain", outputs=[PriorOutput(plain, 0.0)]))
    assert len(run_dry(core)["a:0"].tokens) == OUTPUTS - 2


def test_an_output_that_its_guide_forbids_ends_only_that_sample() -> None:
    core = engine()
    good = run(engine(), asked("grammar"))["a:0"].tokens
    for outputs in ([1, 1], [*good[:3], good[3] + 1]):
        said = run(core, asked("grammar", n=2, outputs=[PriorOutput(outputs, 0.0), PriorOutput([], 0.0)]))
        assert (said["a:0"].reason, said["a:1"].reason) == (FinishReason.ERROR, FinishReason.STOP)


def test_outputs_that_complete_a_guide_end_it() -> None:
    """The engine died after the last token and before the end of the sequence was reported."""
    whole = run(engine(), asked("grammar"))["a:0"]
    rest = run(engine(), asked("grammar", outputs=[PriorOutput(whole.tokens, 0.0)]))["a:0"]
    assert (rest.tokens, rest.reason) == ([], FinishReason.STOP)


def test_a_recorded_resume_replays(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    inner = make_core()
    core = RecordingCore(
        engine_recorder(file), inner.scheduler, inner.runner, inner.clock, depth=1, eos_ids=(3,), vocab_size=50
    )
    core.add(asked("plain", n=3, age_s=2.0, outputs=[PriorOutput([4, 5, 6], 0.5), None, PriorOutput([], 0.0)]))
    while core.busy:
        core.step()
    core.close()
    found = read_recording(str(file))
    assert (found.ends["a:0"].tokens, found.ends["a:0"].ttft_s, "a:1" in found.ends) == (OUTPUTS - 3, 0.5, False)
    assert replay(found).plans == found.plans


# --- keys ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("salt", ["", "tenant"])
def test_keys_sent_with_a_request_equal_the_computed_ones(salt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []
    sha256 = blocks.sha256
    prompt = [n % 50 for n in range(33)]
    keys = b"".join(block_keys(prompt, 4, salt))
    monkeypatch.setattr(blocks, "sha256", lambda data: hashed.append(data) or sha256(data))
    core = make_core()
    new = Add("a", Prompt(prompt, REQUESTS["plain"], RequestMeta(cache_salt=salt)), keys=keys)
    core.add(new)
    core.step()
    assert len(hashed) == 1, "only the root"
    run_dry(core)
    again = Add("b", Prompt(prompt, REQUESTS["plain"], RequestMeta(cache_salt=salt)))
    assert run(core, again)["b:0"].cached_tokens == 32
    other = Add("c", Prompt(prompt, REQUESTS["plain"], RequestMeta(cache_salt=salt + "x")))
    assert run(core, other)["c:0"].cached_tokens == 0


def test_keys_of_another_block_size_are_rejected() -> None:
    core = make_core()
    for keys in (b"".join(block_keys(PROMPT, 8)), b"x", b"x" * 96):
        with pytest.raises(InvalidRequestError) as caught:
            core.add(asked("plain", keys=keys))
        assert caught.value.param == "keys"
    assert make_core(prefix_caching=False).add(asked("plain", keys=b"".join(block_keys(PROMPT, 4)))) is None


def test_a_block_found_by_a_wrong_key_is_not_read() -> None:
    """Tokens are compared as well."""
    core = make_core(runner=FakeRunner(64, 4))
    prompt = list(range(10, 22))
    core.add(Add("liar", Prompt([1] * 12, REQUESTS["plain"]), keys=b"".join(block_keys(prompt, 4))))
    run_dry(core)
    assert run(core, Add("a", Prompt(prompt, REQUESTS["plain"])))["a:0"].cached_tokens == 0


# --- guides over real grammars ------------------------------------------------------------------------------------
BODY = 'start: "{" /[a-z]{1,3}/ "}"'
OPEN_ENDED = 'start: "x" /[a-z]*/'
DEAD_END = 'start: "a" more?\nmore: MORE\nMORE: /b/ & /c/'
THOUGHTS = Thinking(inside=False, begin=(THINK,), end=(THOUGHT,), budget=4, last_words=(*b"so", THOUGHT))
WRITTEN: dict[str, tuple[dict[str, object], list[int]]] = {
    "grammar": ({"grammar": BODY}, [*b"{abc}"]),
    "open end": ({"grammar": OPEN_ENDED}, [*b"xabc", EOS_ID]),
    "token": ({"triggers": (Trigger(grammar=BODY, token_id=CALL),)}, [*b"a {", CALL, *b"{ab} b ", CALL, *b"{c}d"]),
    "text": ({"triggers": (Trigger(grammar=BODY, text="<f>"),)}, [*b"a <f <f>{a}<<f", PAIR, *b"bc} <f>"]),
    "at start": ({"triggers": (Trigger(grammar=BODY, text="{n", at_start=True),)}, [*b" {n{a}{n"]),
    "ends after": ({"triggers": (Trigger(grammar=BODY, text="<f>"),), "ends_after": 2}, [*b"<f>{a}<f>{b}"]),
    "found by the mask": (
        {"triggers": (Trigger(grammar=DEAD_END, token_id=CALL),)},
        [CALL, *b"ab", CALL, *b"a", THINK],
    ),
    "thinks there": (
        {"triggers": (Trigger(grammar=DEAD_END, token_id=CALL),), "thinking": THOUGHTS},
        [CALL, *b"a", THINK, *b"b", CALL, THOUGHT, *b"c", CALL, *b"ac"],
    ),
    "budget": ({"grammar": BODY, "thinking": THOUGHTS}, [THINK, *b"wellso", THOUGHT, *b"{a}"]),
    "budget in parts": (
        {"triggers": (Trigger(grammar=BODY, token_id=CALL),), "thinking": THOUGHTS},
        [*b"a", THINK, *b"bc", THOUGHT, *b"d", CALL, *b"{e}", THINK, *b"xso", THOUGHT, *b"f"],
    ),
    "messages": (
        {"framing": framing()},
        [
            *b"#t",
            CALL,
            *b"a{#t",
            CALL,
            *b"b",
            THOUGHT,
            THINK,
            *b"a#f",
            CALL,
            *b"c",
            THOUGHT,
            THINK,
            *b"a#c",
            CALL,
            *b"{d}",
        ],
    ),
    "answer in messages": (
        {"framing": framing(must_answer=True, budget=2), "grammar": BODY},
        [*b"#t", CALL, *b"wlso", THOUGHT, THINK, *b"a#f", CALL, *b"{a}"],
    ),
    "triggers in messages": (
        {"framing": framing(), "triggers": (Trigger(grammar=DEAD_END, token_id=CALL),), "ends_after": 2},
        [*b"#f", CALL, CALL, *b"ab", CALL, *b"a"],
    ),
    "banned": ({"grammar": OPEN_ENDED, "banned": (ord("b"),), "thinking": THOUGHTS}, [THINK, *b"a", THOUGHT, *b"xac"]),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_guide_after_replay_allows_the_same_tokens(name: str) -> None:
    spec, said = WRITTEN[name]
    wanted: list[object] = []
    output = Writing(**spec)
    for token in said:
        wanted.append((output.allowed(), output.ended))
        output.say([token])
    wanted.append((None if output.ended else output.allowed(), output.ended))
    guides = grammar_guides()
    for cut in range(1, len(said)):
        again = Writing(**spec)
        sequences = GuidedSequences(guides, VOCAB)
        sequences.live["a"] = again.guide
        assert sequences.replay([("a", said[:cut])]) == []
        for at in range(cut, len(said)):
            assert (again.allowed(), again.ended) == wanted[at], f"token {at}, interrupted behind {cut}"
            again.say([said[at]])
        assert (None if again.ended else again.allowed(), again.ended) == wanted[-1]
    guides.close()


def test_a_resumed_output_continues_after_its_grammar_compiles() -> None:
    """The request waits like a new one. Its guide receives the earlier output once it is made."""
    spec = GuideSpec(grammar='start: "{" /[a-z]{6}/ "}"')
    params = SequenceParams(max_tokens=20, seed=3)
    whole = run(make_core(vocab_size=VOCAB, guides=grammar_guides()), Add("a", Prompt(PROMPT, params, guide=spec)))[
        "a:0"
    ]
    assert len(whole.tokens) == 8 and whole.reason is FinishReason.STOP
    for cut in (1, 4, 7):
        core = make_core(vocab_size=VOCAB, guides=grammar_guides())
        new = Add("a", Prompt(PROMPT, params, guide=spec), 2, outputs=[PriorOutput(whole.tokens[:cut], 0.0), None])
        rest = run(core, new)
        assert whole.tokens[:cut] + rest["a:0"].tokens == whole.tokens and set(rest) == {"a:0"}
        core.close()
