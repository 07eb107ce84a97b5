"""Constraints on outputs, as plain data that is sent between processes."""

from typing import Any

import msgspec

from roseinfer.core.guide import Trigger


class JsonOptions(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Options of JSON documents.

    `whitespace_pattern`: regex of the text between two symbols, None = 0 to 32 characters of white space.
    `any_whitespace` False: no text between symbols. `additional_properties`: default for schemas that do not say
    whether objects may have unnamed properties.
    """

    whitespace_pattern: str | None = None
    any_whitespace: bool = True
    additional_properties: bool = True


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, tag="json_schema"):
    """A document that follows `schema`, with keys in the schema's order.

    `strict`: reject keywords that cannot be enforced. Otherwise they are ignored and named in the warnings.
    """

    schema: dict[str, Any]
    strict: bool = False
    options: JsonOptions = JsonOptions()


class Regex(msgspec.Struct, frozen=True, tag="regex"):
    """A text that matches `pattern` as a whole. The syntax is that of Rust's regexes, without look-around."""

    pattern: str


class Choice(msgspec.Struct, frozen=True, tag="choice"):
    """One of these texts."""

    choices: list[str]


class GrammarText(msgspec.Struct, frozen=True, tag="grammar"):
    """A grammar in Lark, or in GBNF if it contains `::=`."""

    text: str


class StructuralTag(msgspec.Struct, frozen=True, kw_only=True, tag="structural_tag"):
    """Fields of a `structural_tag`: `structures` and `triggers`, or `format`."""

    spec: dict[str, Any]
    options: JsonOptions = JsonOptions()


class Prepared(msgspec.Struct, frozen=True, kw_only=True, tag="prepared"):
    """Grammars that roseinfer has built, which may contain a client's schemas. Fields as in `GuideSpec`."""

    grammar: str = ""
    triggers: tuple[Trigger, ...] = ()
    ends_after: int = 0


Constraint = JsonSchema | Regex | Choice | GrammarText | StructuralTag | Prepared

JSON_OBJECT = JsonSchema(schema={"type": "object"}, strict=True)


class BuiltGrammar(msgspec.Struct, frozen=True, kw_only=True, tag="built"):
    """Grammar of a constraint, with fields as in `GuideSpec`.

    `warnings`: what is not enforced. `mask_s`: processor time for a token of one output, 0 if not measured.
    """

    grammar: str = ""
    triggers: tuple[Trigger, ...] = ()
    ends_after: int = 0
    warnings: tuple[str, ...] = ()
    mask_s: float = 0.0
    memory: tuple[int, int] | None = None
