"""Steps from a parsed request to a `Job` that completions and chats share.

A format calls them in this order: `read_settings`, then its own prompts and outputs, then `build_job`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roseinfer.core.guide import GuideSpec
from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.live import fit_context
from roseinfer.server.formats.common_job import AnswerKind, CommonSettings, new_job, read_objectives
from roseinfer.server.formats.sampling import RequestedLogprobs, sampling_params, with_bad_token_ids
from roseinfer.server.formats.schemas import GenerationRequest, StreamOptions
from roseinfer.server.formats.unsupported import check_extras
from roseinfer.server.http.errors import bad_request
from roseinfer.server.http.request_models import unknown_fields
from roseinfer.server.request.inference import RequestContext
from roseinfer.server.request.job import Job, StreamChoices
from roseinfer.server.request.prompts import Encoded
from roseinfer.text.output import OutputParser


@dataclass(frozen=True, slots=True)
class RequestSettings(CommonSettings):
    """Settings of a request that generates text.

    `keep_last`: how many tokens at the end of each prompt to keep, None = all.
    """

    n: int
    stream: StreamChoices | None
    params: SequenceParams
    keep_last: int | None
    logprobs: RequestedLogprobs


@dataclass(frozen=True, slots=True)
class OutputSettings:
    """Constraint and parser of the outputs. `tool_parser`: name of the tool call format.

    `stops`: tokens that end an output besides the model's own.
    """

    guide: GuideSpec | None = None
    parser: Callable[[], OutputParser] | None = None
    tool_parser: str = "none"
    warnings: Sequence[str] = ()
    stops: tuple[int, ...] = ()


def read_settings(
    call: RequestContext,
    request: GenerationRequest,
    max_tokens: int | None,
    logprobs: RequestedLogprobs,
    num_prompts: int = 1,
) -> RequestSettings:
    """Check all fields but those of prompt and output, and set the deadline. `max_tokens`: see `sampling_params`.

    Raises `ApiError` 400, `InvalidRequestError`.
    """
    n = request.n or 1
    limits, info = call.service.limits, call.backend.info
    if n * num_prompts > max(limits.max_prompts, limits.max_choices):
        most = max(limits.max_prompts, limits.max_choices)
        raise bad_request(f"n x prompts is {n * num_prompts}, at most {most} is allowed", "n")
    warnings = check_extras(unknown_fields(request), n)
    promised = read_objectives(call, request, warnings)
    reports = promised.report or call.service.config.enable_force_include_usage
    stream = _stream_choices(request, reports, warnings)
    params, keep_last = sampling_params(request, max_tokens, logprobs, info, limits)
    return RequestSettings(promised, warnings, n, stream, params, keep_last, logprobs)


async def build_job(
    call: RequestContext,
    request: GenerationRequest,
    settings: RequestSettings,
    encoded: list[Encoded],
    output: OutputSettings,
    kind: AnswerKind,
    echo: bool = False,
    prediction: tuple[int, ...] = (),
) -> Job:
    """Return the job. `prediction`: tokens that the client expects as output.

    Raises `RequestTooLongError` for a prompt that leaves no room in the context, `ApiError` 400 for too many tokens,
    `InvalidRequestError` for `bad_words` without tokens.
    """
    limits, meta, params = call.service.limits, settings.objectives.meta, settings.params
    if params.bad_words:
        params = await call.service.offload.run(with_bad_token_ids, params, call.backend.tokenizer, limits)
    if output.stops and not params.ignore_eos:
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *output.stops))
    context = call.backend.info.facts.max_model_len
    prompts = []
    total = 0
    for entry in encoded:
        fitted = fit_context(params, len(entry.ids), context, kind.prompt)
        total += settings.n * (len(entry.ids) + fitted.max_tokens)
        opening = entry.generation_prompt_len
        own = meta if meta.slo is None else replace(meta, slo=meta.slo.for_output(fitted.max_tokens))
        prompts.append(Prompt(entry.ids, fitted, own, output.guide, None, prediction, opening))
    if total > limits.max_total_tokens:
        message = f"n x (prompt + max_tokens) over all prompts is {total} tokens"
        raise bad_request(f"{message}, at most {limits.max_total_tokens} are allowed", "n")
    settings.warnings.extend(output.warnings)
    return new_job(
        call,
        settings,
        prompts,
        api=kind.api,
        id=f"{kind.id_prefix}-{call.request_id}",
        n=settings.n,
        parser=output.parser,
        stream=settings.stream,
        echo=echo,
        echo_texts=tuple(entry.text for entry in encoded) if echo else (),
        logprobs=settings.logprobs.output,
        prompt_logprobs=settings.logprobs.prompt_field,
        return_token_ids=bool(request.return_token_ids),
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        tool_parser=output.tool_parser,
    )


def _stream_choices(request: GenerationRequest, usage: bool, warnings: list[str]) -> StreamChoices | None:
    """Return the choices of a streamed answer. `usage`: it ends with the usage, whether or not the request asks."""
    if not request.stream:
        if request.stream_options is not None:
            raise bad_request("stream_options needs stream: true", "stream_options")
        return None
    options = request.stream_options or StreamOptions.model_validate({})
    if options.model_extra:
        warnings += ignored_stream_options(unknown_fields(options))
    return StreamChoices(
        include_usage=bool(options.include_usage) or usage,
        continuous_usage=bool(options.continuous_usage_stats),
        interval=request.stream_interval or 1,
    )


def ignored_stream_options(extras: dict[str, Any]) -> list[str]:
    """Return warnings. `include_obfuscation: false` has no effect."""
    return [
        f"stream_options.{name}"[:100]
        for name, value in extras.items()
        if name != "include_obfuscation" or value is not False
    ]
