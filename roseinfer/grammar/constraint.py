"""What a client asks of an output, as plain data that travels between processes."""

from typing import Any

import msgspec

from roseinfer.core.guide import Trigger


class JsonOptions(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How documents are written. `whitespace_pattern`: a regex of what may stand between two symbols, None = 0 to 32
    characters of white space; `any_whitespace` False: nothing may. `additional_properties`: whether objects may have
    properties that their schema does not name, where the schema itself says nothing of it.
    """

    whitespace_pattern: str | None = None
    any_whitespace: bool = True
    additional_properties: bool = True


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, tag="json_schema"):
    """A document that follows `schema`, its keys in the schema's order. `strict`: what cannot be enforced is refused;
    else it is ignored, and named in the warnings.
    """

    schema: dict[str, Any]
    strict: bool = False
    options: JsonOptions = JsonOptions()


class Regex(msgspec.Struct, frozen=True, tag="regex"):
    """A text that `pattern`, of Rust's regex syntax without look-around, matches as a whole."""

    pattern: str


class Choice(msgspec.Struct, frozen=True, tag="choice"):
    """One of these texts."""

    choices: list[str]


class GrammarText(msgspec.Struct, frozen=True, tag="grammar"):
    """A text of a grammar in Lark, or in GBNF if there is a `::=` in it."""

    text: str


class StructuralTag(msgspec.Struct, frozen=True, kw_only=True, tag="structural_tag"):
    """What a `structural_tag` holds: `structures` and `triggers`, or `format`."""

    spec: dict[str, Any]
    options: JsonOptions = JsonOptions()


class Prepared(msgspec.Struct, frozen=True, kw_only=True, tag="prepared"):
    """Grammars of our own making, which may hold schemas of a client's. Fields as in `GuideSpec`."""

    grammar: str = ""
    triggers: tuple[Trigger, ...] = ()
    ends_after: int = 0


Constraint = JsonSchema | Regex | Choice | GrammarText | StructuralTag | Prepared

JSON_OBJECT = JsonSchema(schema={"type": "object"}, strict=True)


class BuiltGrammar(msgspec.Struct, frozen=True, kw_only=True, tag="built"):
    """What a constraint becomes, fields as in `GuideSpec`. `warnings`: what of it is not enforced. `mask_s`: processor
    time that a token of one output takes, 0 if it is not known. `memory`: as in `GuideSpec`.
    """

    grammar: str = ""
    triggers: tuple[Trigger, ...] = ()
    ends_after: int = 0
    warnings: tuple[str, ...] = ()
    mask_s: float = 0.0
    memory: tuple[int, int] | None = None
