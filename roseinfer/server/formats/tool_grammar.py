"""Grammars of a request's tool calls, in the model's format."""

from collections.abc import Mapping
from typing import Any

from roseinfer.grammar.constraint import JsonSchema, Prepared
from roseinfer.grammar.json_schema import schema_text
from roseinfer.grammar.library import GrammarError
from roseinfer.grammar.limits import check_depth
from roseinfer.server.formats.tool_fields import Calls, ToolUse
from roseinfer.server.http.errors import bad_request
from roseinfer.text.tools.base import MAX_CALLS, ToolFormat, grammar


def tool_constraint(
    calls: ToolFormat, use: ToolUse, document: JsonSchema | None, after_thinking: bool
) -> tuple[Prepared, list[str]]:
    """Return the constraint of an output with tool calls, and warnings for parts of schemas that are not enforced.

    Without `document`, text is free until the model begins a call, unless a call is required. With a (verified)
    document, the output is calls or that document. Slow for large schemas. Raises `ApiError` 400.
    """
    schemas = ToolSchemas()
    most = use.most or MAX_CALLS
    if document is None and use.calls is Calls.PERHAPS:
        triggers = calls.triggers(use.callable, most, schemas, others=use.callable == use.tools)
        return Prepared(triggers=triggers, ends_after=use.most or 0), schemas.ignored
    rules = calls.rules(use.callable, most, schemas)
    text = "" if document is None else schemas.of(document)
    return Prepared(grammar=grammar(rules, after_thinking, text)), schemas.ignored


class ToolSchemas:
    """Converter of schemas for the grammar library. `ignored`: keywords that it does not enforce."""

    def __init__(self) -> None:
        self.ignored: list[str] = []

    def __call__(self, schema: Mapping[str, Any], strict: bool) -> str:
        return self.of(JsonSchema(schema=dict(schema), strict=strict))

    def of(self, document: JsonSchema) -> str:
        try:
            check_depth(document.schema)
            found = schema_text(document.schema, strict=document.strict, options=document.options)
        except GrammarError as error:
            raise bad_request(f"tools: {error.message}", "tools", error.code) from error
        self.ignored += [f"tools: {name} is not enforced" for name in found.ignored]
        return found.text
