"""Steps from a parsed request to a `Job` that embeddings, reranking and scores share."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from roseinfer.core.pooling import NO_OUTPUT, PoolingInfo, PoolingParams
from roseinfer.core.request import Prompt, kept_prompt_tokens
from roseinfer.server.formats.common_job import AnswerKind, CommonSettings, new_job, read_objectives
from roseinfer.server.formats.objectives import Objectives
from roseinfer.server.formats.pooling.request import PoolingFields
from roseinfer.server.formats.unsupported import Unsupported, always, check_extras, if_set, supported, unless
from roseinfer.server.http.errors import bad_request
from roseinfer.server.http.request_models import unknown_fields
from roseinfer.server.request.inference import RequestContext
from roseinfer.server.request.inputs import Truncation
from roseinfer.server.request.job import Job

_ACTIVATION = "results are those of the model's own activation"
_LENGTH = "use truncate_prompt_tokens"
_WIDTH = "use dimensions"
_PROMPT = "use prompt_name, or put the prompt before the text"
_FLOATS = "embeddings are float32"
_UNSUPPORTED: dict[str, Unsupported] = {
    "stream": Unsupported("answers are not streamed", if_set),
    "use_activation": Unsupported(_ACTIVATION, unless(True)),
    "activation": Unsupported(_ACTIVATION, unless(True)),
    "normalize": Unsupported(_ACTIVATION, unless(True)),
    "normalized": Unsupported(_ACTIVATION, unless(True)),
    "raw_scores": Unsupported(_ACTIVATION, unless(False)),
    "embed_dtype": Unsupported(_FLOATS, unless("float32")),
    "output_dtype": Unsupported(_FLOATS, unless("float")),
    "embedding_type": Unsupported("use encoding_format", unless("float")),
    "embedding_types": Unsupported("use encoding_format", unless(["float"])),
    "endianness": Unsupported("base64 is little-endian", unless("native", "little")),
    "output_dimension": Unsupported(_WIDTH, always),
    "output_dimensionality": Unsupported(_WIDTH, always),
    "truncate_dim": Unsupported(_WIDTH, always),
    "truncate": Unsupported(_LENGTH, unless("NONE", False)),
    "truncation": Unsupported(_LENGTH, unless(False)),
    "max_tokens_per_doc": Unsupported(_LENGTH, always),
    "max_chunks_per_doc": Unsupported(_LENGTH, unless(1)),
    "padding": Unsupported("inputs are not padded", unless("do_not_pad")),
    "task": Unsupported(_PROMPT, always),
    "input_type": Unsupported(_PROMPT, always),
    "late_chunking": Unsupported("each input is embedded alone", unless(False)),
    "top_k": Unsupported("use top_n", always),
    "add_special_tokens": Unsupported("a pair has the model's own form", unless(True)),
    "rank_fields": Unsupported("a document is a text", if_set),
    "tpot": Unsupported("there are no tokens after the first", always),
    "pred_output_len": Unsupported("there is no output", always),
}


@dataclass(frozen=True, slots=True)
class PoolingSettings(CommonSettings):
    """Settings of a prompt-only request. `cut`: how longer inputs are truncated; None: they are rejected."""

    info: PoolingInfo
    cut: Truncation | None


def read_settings(call: RequestContext, request: PoolingFields) -> PoolingSettings:
    """Check the shared fields, and set the deadline. Raises `ApiError` 400, `InvalidRequestError`."""
    call.offer_request_id(request.request_id)
    info = call.backend.info.facts.pooling
    assert info is not None, "checked by `Inference`"
    warnings = check_extras(supported(unknown_fields(request), _UNSUPPORTED))
    promised = _objectives(call, request, warnings)
    return PoolingSettings(promised, warnings, info, _truncation(call, request))


def build_job(
    call: RequestContext,
    settings: PoolingSettings,
    inputs: list[tuple[list[int], PoolingParams]],
    kind: AnswerKind,
    about: Mapping[str, Any],
) -> Job:
    """Return the job. `about`: what the answer needs of the request.

    Raises `ApiError` 400 for too many tokens.
    """
    total, most = sum(len(ids) for ids, _ in inputs), call.service.limits.max_total_tokens
    if total > most:
        raise bad_request(f"the inputs have {total} tokens, at most {most} are allowed", kind.prompt)
    meta = settings.objectives.meta
    prompts = [Prompt(ids, NO_OUTPUT, meta, pooling=params) for ids, params in inputs]
    return new_job(call, settings, prompts, api=kind.api, id=f"{kind.id_prefix}-{call.request_id}", about=about)


def prompt_text(info: PoolingInfo, name: str | None) -> str:
    """Return the text that goes before each input. Raises `ApiError` 400 for an unknown name."""
    if name is None:
        return info.prompts.get(info.default_prompt or "", "")
    if name not in info.prompts:
        known = ", ".join(map(repr, list(info.prompts)[:16])) or "none"
        raise bad_request(f"prompt_name: unknown prompt {name[:64]!r} (known: {known})", "prompt_name")
    return info.prompts[name]


def _objectives(call: RequestContext, request: PoolingFields, warnings: list[str]) -> Objectives:
    if request.slo is not None and request.slo.tpot_ms is not None:
        raise bad_request("slo.tpot_ms is not supported: there are no tokens after the first", "slo.tpot_ms")
    promised = read_objectives(call, request, warnings)
    meta = promised.meta
    if meta.slo is None:
        return promised
    # A class or a header may set TPOT. The name of the class stays.
    return replace(promised, meta=replace(meta, slo=replace(meta.slo, tpot_s=None)))


def _truncation(call: RequestContext, request: PoolingFields) -> Truncation | None:
    if request.truncate_prompt_tokens == 0:
        raise bad_request("truncate_prompt_tokens must be -1 or at least 1", "truncate_prompt_tokens")
    kept = kept_prompt_tokens(request.truncate_prompt_tokens, 0, call.backend.info.facts.max_model_len)
    return None if kept is None else Truncation(kept, at_start=request.truncation_side == "left")
