"""Build the grammar of a constraint, and prove that it can be used."""

from collections.abc import Mapping

import msgspec

from roseinfer.grammar.constraint import (
    BuiltGrammar,
    Choice,
    Constraint,
    GrammarText,
    JsonSchema,
    Prepared,
    Regex,
)
from roseinfer.grammar.json_schema import explain_error, schema_text, unenforced_keywords
from roseinfer.grammar.lark import choice_grammar, lark_text, regex_grammar, serialised, with_leading_space
from roseinfer.grammar.library import GrammarError, GrammarTokens, compile_grammar
from roseinfer.grammar.limits import MAX_BYTES, check_depth, too_complex
from roseinfer.grammar.mask_time import mask_time_s
from roseinfer.grammar.memory import GrammarMemory, heap_bytes
from roseinfer.grammar.structural_tag import structural_tag_grammar


def build_grammar(constraint: Constraint, markers: Mapping[str, int], leading_space: bool = False) -> BuiltGrammar:
    """Return the grammar of a constraint, which is not compiled. Raises `GrammarError` for an invalid constraint.

    `leading_space`: allow white space before the answer, as models write it after their thinking. `markers`: see
    `lark.literal`.
    """
    made = _build(constraint, markers)
    if leading_space and made.grammar and not isinstance(constraint, Prepared):
        made = BuiltGrammar(grammar=with_leading_space(made.grammar), warnings=made.warnings)
    return made


def prove_grammar(made: BuiltGrammar, tokens: GrammarTokens) -> BuiltGrammar:
    """Compile the grammars and measure the time and memory of their masks. Unenforced keywords join the warnings.

    Raises `GrammarError`.
    """
    ignored = dict.fromkeys(made.warnings)
    mask_s = 0.0
    memory: GrammarMemory | None = None
    for text in [made.grammar, *(trigger.grammar for trigger in made.triggers)]:
        if not text:
            continue
        before = heap_bytes()
        try:
            grammar = compile_grammar(text, tokens)
        except GrammarError as error:
            raise explain_error(error) from error
        compiled = heap_bytes()
        mask_s = max(mask_s, mask_time_s(grammar, tokens))
        walked = heap_bytes()
        if before is not None and compiled is not None and walked is not None:
            taken = GrammarMemory(max(0, compiled - before), max(0, walked - compiled))
            memory = max(memory or taken, taken, key=sum)
        for warning in grammar.warnings():
            ignored |= dict.fromkeys(unenforced_keywords(warning) or [warning[:200]])
    return msgspec.structs.replace(made, warnings=tuple(ignored), mask_s=mask_s, memory=memory)


def check_size(constraint: Constraint, encoded: int) -> None:
    """Raise `GrammarError` for a constraint of more than `MAX_BYTES`. `encoded`: its bytes as msgpack."""
    if encoded <= MAX_BYTES:
        return
    if isinstance(constraint, Prepared):
        advice = "use fewer parameters or fewer strict tools"
        raise too_complex(
            f"the grammar of all tool calls has {encoded} bytes, at most {MAX_BYTES} are allowed: {advice}"
        )
    raise too_complex(f"the constraint is larger than {MAX_BYTES} bytes")


def _build(constraint: Constraint, markers: Mapping[str, int]) -> BuiltGrammar:
    if isinstance(constraint, JsonSchema):
        check_depth(constraint.schema)
        schema = schema_text(constraint.schema, strict=constraint.strict, options=constraint.options)
        # The schema stays text: it may be large, and the order of its keys counts.
        text = '{"grammars":[{"json_schema":' + schema.text + "}]}"
        return BuiltGrammar(grammar=text, warnings=schema.ignored)
    if isinstance(constraint, Regex):
        return BuiltGrammar(grammar=regex_grammar(constraint.pattern))
    if isinstance(constraint, Choice):
        return BuiltGrammar(grammar=choice_grammar(constraint.choices))
    if isinstance(constraint, GrammarText):
        return BuiltGrammar(grammar=serialised([{"lark_grammar": lark_text(constraint.text)}]))
    if isinstance(constraint, Prepared):
        return BuiltGrammar(grammar=constraint.grammar, triggers=constraint.triggers, ends_after=constraint.ends_after)
    check_depth(constraint.spec)
    return structural_tag_grammar(constraint, markers)
