"""JSON Schema's own test suite, with strict schemas, against what is known to pass, to be refused, and to be wrong.

The suite (https://github.com/json-schema-org/JSON-Schema-Test-Suite) is not part of the project: JSON_SCHEMA_TEST_SUITE
names its folder. To write down what has become of it: `python -m tests.grammar.test_json_schema_suite`.
"""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest

from roseinfer.core.errors import InvalidRequestError
from roseinfer.grammar.library import GrammarError, compile_grammar
from tests.helpers.grammars import of_schema, tiny_tokens

RATCHET = Path(__file__).with_name("json_schema_suite.json")
BESIDE = Path(__file__).parents[3] / "shared" / "data" / "json-schema-test-suite"
SUITE = Path(os.environ.get("JSON_SCHEMA_TEST_SUITE", BESIDE)) / "tests"
DRAFTS = ("draft2020-12", "draft7")


def outcomes(group: dict[str, Any]) -> Counter[str]:
    """Tests of one schema by result: passed, refused (the schema is), or wrongly accepted or rejected."""
    tests = group["tests"]
    try:
        if not isinstance(group["schema"], dict):
            raise GrammarError("a schema has to be an object")
        grammar = compile_grammar(of_schema(group["schema"]).grammar, tiny_tokens())
    except InvalidRequestError:
        return Counter(refused=len(tests))
    found: Counter[str] = Counter()
    for test in tests:
        matcher = grammar.matcher()
        ids = tiny_tokens().spell(json.dumps(test["data"], ensure_ascii=False).encode())
        accepted = matcher.allows(ids) and (matcher.consume(ids) or matcher.raw.is_accepting())
        wrong = "wrongly_accepted" if accepted else "wrongly_rejected"
        found["passed" if accepted == test["valid"] else wrong] += 1
    return found


def measured() -> dict[str, dict[str, int]]:
    """Outcomes by file of the suite."""
    files = sorted(path for draft in DRAFTS for path in (SUITE / draft).rglob("*.json"))
    groups = {path.relative_to(SUITE).as_posix(): orjson.loads(path.read_bytes()) for path in files}
    return {name: dict(sorted(sum(map(outcomes, found), Counter()).items())) for name, found in groups.items()}


@pytest.mark.skipif(not SUITE.is_dir(), reason="there is no JSON-Schema-Test-Suite")
def test_the_results_of_the_suite_are_as_recorded() -> None:
    known, found = json.loads(RATCHET.read_text()), measured()
    assert sum(map(sum, (counts.values() for counts in found.values()))) > 3000
    assert {name: found[name] for name in found if found[name] != known.get(name)} == {}
    assert found.keys() == known.keys()


def test_wrongly_accepted_documents_concern_optional_formats_and_contents() -> None:
    """Enforced schemas accept an invalid document only where validators need not check it."""
    known = json.loads(RATCHET.read_text())
    wrong = {name for name, counts in known.items() if "wrongly_accepted" in counts}
    assert {name.partition("/optional/")[1] for name in wrong} == {"/optional/"}


if __name__ == "__main__":
    lines = (f"  {json.dumps(name)}: {json.dumps(counts)}" for name, counts in measured().items())
    RATCHET.write_text("{\n" + ",\n".join(lines) + "\n}\n")
