"""Constraint of an output from the fields `response_format`, `structured_outputs` and `guided_*`."""

import re

from roseinfer.core.guide import GuideSpec
from roseinfer.grammar.constraint import JSON_OBJECT, Constraint, JsonSchema, StructuralTag
from roseinfer.grammar.structured_outputs import KINDS, OPTIONS, structured_constraint
from roseinfer.server.formats.schemas import GenerationRequest, JsonSchemaFormat, ResponseFormat, StructuredOutputs
from roseinfer.server.http.errors import bad_request
from roseinfer.server.http.request_models import unknown_fields
from roseinfer.server.request.grammars import Grammars, Proof

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Fields that set a constraint, or are named in a warning about one.
CONSTRAINT_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_whitespace_pattern",
    "guided_decoding_backend",
)
# Older names of the fields of `structured_outputs`.
_GUIDED = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar", "whitespace_pattern")}


class OutputConstraint:
    """Constraint that a request sets for its output, None without one. `param`: the field that sets it.

    `proof`: from `start_proof`; None: not started.
    """

    def __init__(self, request: GenerationRequest) -> None:
        """Raise `ApiError` 400 or `InvalidRequestError` that names the field."""
        self.constraint: Constraint | None = None
        self.param = ""
        self.proof: Proof | None = None
        self.warnings: list[str] = []
        guided = {name: value for name in _GUIDED if (value := getattr(request, name)) is not None}
        if request.guided_decoding_backend is not None:
            self.warnings.append("guided_decoding_backend")
        given = {"structured_outputs": request.structured_outputs}
        if guided:
            fields = {_GUIDED[name]: value for name, value in guided.items()}
            given[next(iter(guided))] = StructuredOutputs.model_validate(fields)
        for param, outputs in given.items():
            if outputs is not None:
                self._add(param, _of_outputs(outputs, param, self.warnings))
        if request.response_format is not None:
            self._add("response_format", _of_format(request.response_format, self.warnings))

    def _add(self, param: str, constraint: Constraint | None) -> None:
        if constraint is None:
            return
        if self.constraint is not None:
            raise bad_request(f"{param} and {self.param} cannot be combined", param)
        self.constraint, self.param = constraint, param

    def start_proof(self, grammars: Grammars, leading_space: bool = False) -> None:
        """Start to verify the constraint, so that this runs while the prompts are made."""
        if self.constraint is not None:
            self.proof = grammars.begin(self.constraint, self.param, leading_space)

    async def guide(self, grammars: Grammars, n: int) -> tuple[GuideSpec | None, list[str]]:
        """Return the guide for the engine, and warnings. Raises `ApiError` 503, `InvalidRequestError`."""
        if self.constraint is None:
            return None, self.warnings
        spec, warnings = await grammars.guide(self.constraint, self.param, proof=self.proof, n=n)
        return spec, self.warnings + warnings


def is_constrained(request: GenerationRequest) -> bool:
    """True if a field that sets or mentions a constraint is given."""
    return any(getattr(request, name) is not None for name in CONSTRAINT_FIELDS)


# --- response_format --------------------------------------------------------------------------------------------
def _of_format(asked: ResponseFormat, warnings: list[str]) -> Constraint | None:
    param = "response_format"
    beside = {name for name in ("json_schema", "format", "structures", "triggers") if getattr(asked, name) is not None}
    belongs = {"json_schema": {"json_schema"}, "structural_tag": {"format", "structures", "triggers"}}
    for name in sorted(beside - belongs.get(asked.type, set())):
        raise bad_request(f"{param}.{name} cannot be combined with type {asked.type[:80]!r}", param)
    warnings += [f"{param}.{name}"[:100] for name in unknown_fields(asked)]
    if asked.type == "text":
        return None
    if asked.type == "json_object":
        return JSON_OBJECT
    if asked.type == "json_schema":
        if asked.json_schema is None:
            raise bad_request(f"{param} of type json_schema needs json_schema", param)
        return _of_json_schema(asked.json_schema, param, warnings)
    if asked.type == "structural_tag":
        return StructuralTag(spec=asked.model_dump(exclude_none=True, exclude=set(unknown_fields(asked))))
    message = f"{param}.type {asked.type[:80]!r} is unknown; known: text, json_object, json_schema, structural_tag"
    raise bad_request(message, param)


def _of_json_schema(asked: JsonSchemaFormat, param: str, warnings: list[str]) -> Constraint:
    if asked.name is None or not _NAME.fullmatch(asked.name):
        raise bad_request(f"{param}.json_schema.name must be 1 to 64 letters, digits, '_' or '-'", param)
    if asked.schema_ is None:
        raise bad_request(f"{param}.json_schema needs its schema", param)
    warnings += [f"{param}.json_schema.{name}"[:100] for name in unknown_fields(asked)]
    return JsonSchema(schema=asked.schema_, strict=bool(asked.strict))


# --- structured_outputs and guided_* ----------------------------------------------------------------------------
def _of_outputs(asked: StructuredOutputs, param: str, warnings: list[str]) -> Constraint:
    # `json` is a method of the model.
    fields = {name: getattr(asked, "json_" if name == "json" else name) for name in (*KINDS, *OPTIONS)}
    constraint = structured_constraint(fields, param)
    warnings += [f"{param}.{name}"[:100] for name in unknown_fields(asked)]
    return constraint
