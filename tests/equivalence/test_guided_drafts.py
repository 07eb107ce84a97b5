"""Whole engines whose constrained requests have drafts, right and wrong: texts are those without any.

On a CPU, and on a GPU if there is one. Sampling and constraint of each prompt differ.
"""

from pathlib import Path
from typing import Any

from roseinfer.core.guide import GuideSpec, Thinking, Trigger
from roseinfer.core.outputs import FinishReason
from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.core import EngineCore
from roseinfer.engine.guided.grammar_cache import GrammarGuideFactory
from roseinfer.engine.guided.guides import GuidedSequences
from roseinfer.engine.messages import Add
from roseinfer.grammar.library import GrammarTokens
from tests.equivalence.models import SHAPES, SMALL_SHAPES, VOCAB, save_model
from tests.equivalence.runs import CUDA, PROMPTS, SETTINGS, start
from tests.helpers.cases import each_value
from tests.helpers.drafters import Oracle, UncheckedDrafts, every_draft_of
from tests.helpers.engines import Collected, gather
from tests.helpers.tokenizers import EOS_ID
from tests.helpers.writing import CALL, THINK, THOUGHT, TOKENIZER, framing

TOKENS = GrammarTokens.of(TOKENIZER, VOCAB, (EOS_ID,))
OBJECT = r'start: "{" pair ("," pair)* "}"' + "\n" + r'pair: "name" ":" /[a-z]{1,4}/ | "number" ":" /[0-9]+/'
ANY = tuple(range(0, VOCAB, 3))
TRIGGERS = tuple(Trigger(grammar='start: "call(" /[a-z]/ ")"', token_id=token) for token in ANY)
CASES: dict[str, tuple[GuideSpec, dict[str, Any]]] = {
    "one": (GuideSpec(grammar=OBJECT), {"temperature": 0.0}),
    "short": (GuideSpec(grammar=OBJECT), {"temperature": 1.0, "top_p": 0.9, "min_tokens": 12}),
    "block": (GuideSpec(grammar='start: ("ab" | "ac" | "b")*'), {"temperature": 0.8, "frequency_penalty": 0.6}),
    "head": (GuideSpec(triggers=TRIGGERS, ends_after=2), {"temperature": 1.0}),
    "branch": (GuideSpec(framing=framing(budget=9), triggers=TRIGGERS), {"temperature": 1.2, "top_k": 20}),
    "longer": (
        GuideSpec(
            grammar=OBJECT,
            banned=(CALL,),
            thinking=Thinking(inside=True, begin=(THINK,), end=(THOUGHT,), budget=6, last_words=(*b"so", THOUGHT)),
        ),
        {"temperature": 0.9},
    ),
    "long": (GuideSpec(banned=ANY), {"temperature": 0.7, "presence_penalty": 1.0}),
    "again": (GuideSpec(grammar="start: /[a-z]{30}/"), {"temperature": 0.0, "repetition_penalty": 1.3}),
}


def started(path: Path, setting: str) -> EngineCore:
    core = start(path, "cuda" if CUDA else "cpu", "float32", **SETTINGS[setting], speculation="ngram")
    core.__class__ = UncheckedDrafts
    core.guided = GuidedSequences(GrammarGuideFactory(lambda: TOKENS, VOCAB), VOCAB)
    core.eos_ids = frozenset((EOS_ID,))
    return core


def run(core: EngineCore) -> dict[str, Collected]:
    for number, (name, (guide, params)) in enumerate(CASES.items()):
        sampling = SequenceParams(max_tokens=28 + number, seed=number, logprobs=0, **params)
        core.add(Add(name, Prompt(PROMPTS[name], sampling, guide=guide), 2 if name == "short" else 1))
    found: dict[str, Collected] = {}
    while core.busy:
        gather(core.step(), found)
        core.scheduler.check_integrity()
    assert not core.guided.live
    return found


@each_value(setting=["plain", "all at once"], right=[0.6, 1.0])
def test_drafts_change_no_constrained_output(setting: str, right: float, tmp_path: Path) -> None:
    path = save_model("qwen3", (SHAPES if CUDA else SMALL_SHAPES)["qwen3"], tmp_path)
    core = started(path, setting)
    core.scheduler.drafting = None
    plain = run(core)
    known = {name: done.tokens for name, done in plain.items()}
    core.scheduler.drafting = every_draft_of(Oracle(known, VOCAB, right))
    drafted = run(core)
    assert {name: (done.tokens, done.reason) for name, done in drafted.items()} == {
        name: (done.tokens, done.reason) for name, done in plain.items()
    }
    assert all(done.logprobs == done.tokens for done in drafted.values())
    assert {done.reason for done in plain.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    counts = core.scheduler.drafting.counts["test"]
    assert counts.steps > 20 and sum(counts.accepted) / sum(counts.drafted) > 0.2
    core.close()
