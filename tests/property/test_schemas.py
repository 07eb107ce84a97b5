"""Random schemas and random loads: every document obeys its schema under any schedule, and nothing leaks.

The runner draws uniformly from the allowed tokens, so a grammar that allows too much shows.
"""

import json
import random
from typing import Any

import jsonschema
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.core.guide import GuideSpec, Thinking
from roseinfer.core.outputs import FinishReason
from roseinfer.core.request import Prompt, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.core import EngineCore
from roseinfer.engine.guided.grammar_cache import GrammarGuideFactory
from roseinfer.engine.messages import Add
from roseinfer.grammar.constraint import JsonOptions
from roseinfer.grammar.json_schema import schema_text
from roseinfer.grammar.lark import serialised
from tests.helpers.cases import examples
from tests.helpers.drafters import Oracle, UncheckedDrafts
from tests.helpers.engines import Collected, gather, make_core, run_dry
from tests.helpers.fake_runner import FakeRunner
from tests.helpers.tokenizers import EOS_ID
from tests.helpers.writing import CALL, THINK, THOUGHT, TOKENS, VOCAB, text_of

Job = tuple[Add, dict[str, Any] | None]  # and the schema that its outputs follow

BLOCK_SIZE = 8
MOST_TOKENS = 96

NAMES = st.sampled_from(["a", "b", "name", "größe", 'say "hi"'])
LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more}, *[st.integers(0, 99)] * 2),
    st.builds(lambda longest: {"type": "string", "maxLength": longest}, st.integers(0, 4)),
    st.sampled_from([{"type": "string", "pattern": "^[a-z]{2}-[0-9]$"}, {"type": "string", "format": "date"}]),
    st.builds(lambda values: {"enum": values}, st.lists(st.sampled_from([1, "x", None, True, "é", 2.5]), min_size=1)),
    st.builds(lambda value: {"const": value}, st.sampled_from(["k", 7, [1, "y"], {"z": None}])),
)


def objects(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(properties: dict[str, Any], optional: int) -> dict[str, Any]:
        required = list(properties)[optional:]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return st.builds(build, st.dictionaries(NAMES, parts, max_size=3), st.integers(0, 2))


def arrays(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(items: Any, fewest: int, more: int) -> dict[str, Any]:
        return {"type": "array", "items": items, "minItems": fewest, "maxItems": fewest + more}

    return st.builds(build, parts, st.integers(0, 2), st.integers(0, 2))


SCHEMAS = st.recursive(
    LEAVES,
    lambda parts: st.one_of(
        objects(parts),
        arrays(parts),
        st.builds(lambda options: {"anyOf": options}, st.lists(parts, min_size=1, max_size=3)),
    ),
    max_leaves=5,
)
LIST = {
    "type": "object",
    "properties": {"v": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}
GUIDES = GrammarGuideFactory(lambda: TOKENS, VOCAB)


def grammar_of(schema: dict[str, Any]) -> str:
    text = schema_text(schema, strict=True, options=JsonOptions()).text
    return serialised([{"json_schema": json.loads(text)}])


def jobs_of(schemas: list[dict[str, Any]], rng: random.Random) -> list[Job]:
    """Draw requests, most of them with one of the schemas, some free."""
    jobs: list[Job] = []
    for number in range(6):
        schema = rng.choice([*schemas, None])
        guide = None
        if schema is not None:
            thinking = Thinking(inside=True, begin=(THINK,), end=(THOUGHT,), budget=rng.randrange(4))
            guide = GuideSpec(grammar=grammar_of(schema), thinking=rng.choice([None, thinking]), banned=(CALL,))
        prompt = [rng.randrange(256) for _ in range(rng.choice([3, 24]))]
        params = SequenceParams(
            max_tokens=MOST_TOKENS if schema is not None else 20,
            seed=rng.randrange(3),
            ignore_eos=rng.random() < 0.5,
            min_tokens=rng.choice([0, 5]),
        )
        jobs.append((Add(str(number), Prompt(prompt, params, RequestMeta(), guide), rng.choice([1, 1, 2])), schema))
    return jobs


def run(
    jobs: list[tuple[Add, dict[str, Any] | None]], rng: random.Random, abort: bool, **options: Any
) -> dict[str, Collected]:
    runner = FakeRunner(options["num_blocks"], BLOCK_SIZE, VOCAB)
    core = make_core(vocab_size=VOCAB, runner=runner, guides=GUIDES, block_size=BLOCK_SIZE, **options)
    core.eos_ids = frozenset((EOS_ID,))
    collected: dict[str, Collected] = {}
    for new, _ in jobs:
        core.add(new)
        for _ in range(rng.randrange(4)):
            gather(core.step(), collected)
        if abort and rng.random() < 0.3:
            core.abort([f"{rng.randrange(6)}:0"])
    run_dry(core, collected)
    return collected


def document(tokens: list[int]) -> Any:
    """Return the output after the reasoning."""
    behind = len(tokens) - tokens[::-1].index(THOUGHT) if THOUGHT in tokens else 0
    return json.loads(text_of(tokens[behind:]))


@examples(30, derandomize=True)
@given(
    schemas=st.lists(st.one_of(SCHEMAS, st.just(LIST)), min_size=1, max_size=3),
    seed=st.integers(0, 10**6),
    depth=st.sampled_from([1, 2]),
    seats=st.integers(1, 6),
    spare_blocks=st.integers(0, 8),
    prefix_caching=st.booleans(),
    right=st.sampled_from([None, 0.3, 0.8, 1.0]),
    engine=st.sampled_from([EngineCore, UncheckedDrafts]),
)
def test_documents_obey_their_schemas_under_any_schedule(
    schemas, seed, depth, seats, spare_blocks, prefix_caching, right, engine
):
    jobs = jobs_of(schemas, random.Random(seed))
    ease = run(jobs, random.Random(seed), False, num_blocks=600, max_num_batched_tokens=64)
    got = run(
        jobs,
        random.Random(seed),
        True,
        depth=depth,
        num_blocks=-(-(24 + MOST_TOKENS) // BLOCK_SIZE) + 1 + spare_blocks,
        max_num_seqs=seats,
        max_num_batched_tokens=30,
        prefix_caching=prefix_caching,
        drafter=None if right is None else Oracle({name: said.tokens for name, said in ease.items()}, VOCAB, right),
        engine=engine,
    )
    assert got.keys() == ease.keys()
    for name, said in got.items():
        schema = jobs[int(name.split(":")[0])][1]
        if said.reason is FinishReason.ABORT:
            assert said.tokens == ease[name].tokens[: len(said.tokens)]
            continue
        assert (said.tokens, said.reason) == (ease[name].tokens, ease[name].reason)
        assert said.reason in (FinishReason.STOP, FinishReason.LENGTH)
        if schema is not None and said.reason is FinishReason.STOP:
            jsonschema.validate(document(said.tokens), schema, jsonschema.Draft202012Validator)
