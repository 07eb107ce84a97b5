"""Grammars of headers, each with the arguments of the tool call that it begins, in Lark.

The grammar of any other header ends with it, so the content is free.
"""

from collections.abc import Sequence

from roseinfer.text.harmony.tokens import ANALYSIS, COMMENTARY, FINAL, FUNCTIONS, ROLE, HarmonyTokens
from roseinfer.text.tools.base import Schemas, Tool, literal

# Names that models may call which are not offered; see `tool_fields`.
_ANY_FUNCTION = rf"/ to={FUNCTIONS.replace('.', chr(92) + '.')}[A-Za-z0-9_.-]{{1,64}}/"
_TERMINALS = 'SPACE: " "\nTYPE: /[a-z]{1,16}/\nSPACED_TYPE: / [a-z]{1,16}/\n'


def header_grammar(
    tokens: HarmonyTokens,
    channels: Sequence[str],
    tools: Sequence[Tool] = (),
    schemas: Schemas | None = None,
    others: bool = False,
) -> str:
    """Return the grammar of a header in one of `channels`, or of a call of one of `tools`.

    The arguments follow the tool's schema. `others`: also calls of other tools, with any JSON object as arguments.
    """
    channel, content = f"<[{tokens.channel}]>", f"<[{tokens.message}]>"
    rules, choices = [_TERMINALS], []
    for name in channels:
        # A preamble has no type; with one, it would be a call to nobody.
        type = "" if name == COMMENTARY else " type?"
        choices.append(f"{channel} {literal(name)}{type} {content}")
    calls = [(literal(f" to={FUNCTIONS}{tool.name}"), tool.schema, tool.strict) for tool in tools]
    if others:
        named = " | ".join(to for to, _, _ in calls)
        calls.append((f"{_ANY_FUNCTION} & ~({named})" if named else _ANY_FUNCTION, {"type": "object"}, False))
    for i, (to, schema, strict) in enumerate(calls):
        assert schemas is not None, "calls have arguments"
        both = f"(TO_{i} {channel} {literal(COMMENTARY)} | {channel} {literal(COMMENTARY)} TO_{i})"
        rules.append(f"TO_{i}: {to}\n")
        choices.append(f"{both} type? {content} %json {schemas(schema, strict)}")
    rules.append(f"type: SPACE? <[{tokens.constrain}]> TYPE | SPACED_TYPE\n")
    header = "\n    | ".join(choices)
    return f"start: <[{tokens.start}]> {literal(ROLE)} header\nheader: {header}\n" + "".join(rules)


def channels(reasoning: bool, preambles: bool, answer: bool) -> tuple[str, ...]:
    """Return the channels of messages that are no calls."""
    wanted = ((ANALYSIS, reasoning), (COMMENTARY, preambles), (FINAL, answer))
    return tuple(name for name, is_wanted in wanted if is_wanted)
