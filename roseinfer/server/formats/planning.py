"""From a parsed request to a `Job`: the part that completions and chat completions share."""

import time
from dataclasses import replace
from typing import Any

from roseinfer.core.request import kept_prompt_tokens
from roseinfer.server.formats.refused import check_extras
from roseinfer.server.formats.sampling import LogprobsAsked, fit, sampling_params, spelled_out
from roseinfer.server.formats.schemas import GenerationRequest, StreamOptions, unknown_fields
from roseinfer.server.http.errors import bad_request
from roseinfer.server.request.inference import Call
from roseinfer.server.request.job import Job, Prompt, StreamChoices
from roseinfer.server.request.objectives import Objectives, objectives
from roseinfer.server.request.prompts import Encoded

MAX_SALT_CHARS = 128
_NOT_IN_SALTS = frozenset("@/\\\0")


class Draft:
    """A request whose fields have been checked, as far as they can be before its prompt is tokenised.

    `max_tokens` None = the rest of the context. Raises `ApiError` 400 or 404 and `InvalidRequestError` when made.
    """

    def __init__(
        self, call: Call, request: GenerationRequest, max_tokens: int | None, asked: LogprobsAsked, prompts: int = 1
    ) -> None:
        self.call = call
        self.request = request
        self.model = call.service.resolve_model(request.model)
        self.asked = asked
        self.n = self._checked_n(prompts)
        self.warnings = check_extras(unknown_fields(request), self.n)
        self.objectives = self._checked_objectives()
        self.stream = self._stream_choices()
        self.salt = _checked_salt(request.cache_salt)
        self.params = sampling_params(request, max_tokens, asked, call.backend.info, call.limits)

        self.keep_last = self._kept_of_prompts(max_tokens)

    async def spell_out(self) -> None:
        """Turns `bad_words` into token ids, away from the event loop. Raises `InvalidRequestError`, `ApiError` 400."""
        if self.params.bad_words:
            service, tokenizer = self.call.service, self.call.backend.tokenizer
            self.params = await service.offload.run(spelled_out, self.params, tokenizer, self.call.limits)

    def _kept_of_prompts(self, max_tokens: int | None) -> int | None:
        """How many of each prompt's last tokens are used, None = all; the engine need not know of it any more."""
        truncate, self.params = self.params.truncate_prompt_tokens, replace(self.params, truncate_prompt_tokens=None)
        context = self.call.backend.info.max_model_len
        # The rest of the context is what is left, but it cannot be nothing.
        return kept_prompt_tokens(truncate, 1 if max_tokens is None else max_tokens, context)

    def job(self, api: str, id_prefix: str, encoded: list[Encoded], param: str, echo: bool = False) -> Job:
        """`api`: what logs call the kind of answer; `param`: the field that the prompt came from.

        Raises `RequestTooLongError` for a prompt that leaves no room in the context, `ApiError` 400 for too much.
        """
        call, request, promised = self.call, self.request, self.objectives
        context = call.backend.info.max_model_len
        meta = promised.meta(call.arrival_s, self.salt)
        prompts = tuple(
            Prompt(
                ids=entry.ids,
                params=fit(self.params, len(entry.ids), context, param),
                meta=meta,
                text=entry.text if echo else "",
            )
            for entry in encoded
        )
        self._check_total(sum(len(prompt.ids) + prompt.params.max_tokens for prompt in prompts))
        return Job(
            api=api,
            id=f"{id_prefix}-{call.request_id}",
            request_id=call.request_id,
            model=self.model,
            created=int(time.time()),
            arrival_s=call.arrival_s,
            meta=meta,
            prompts=prompts,
            n=self.n,
            stream=self.stream,
            echo=echo,
            logprobs=self.asked.output,
            prompt_logprobs=self.asked.prompt_field,
            return_token_ids=bool(request.return_token_ids),
            tokens_as_ids=bool(request.return_tokens_as_token_ids),
            warnings=tuple(self.warnings[: call.limits.max_warnings]),
            first_token_by_s=None if promised.ttl_s is None else call.arrival_s + promised.ttl_s,
            report_slo=promised.report,
        )

    def _checked_objectives(self) -> Objectives:
        """A tier that names no class is ignored, like any field that says nothing here."""
        call, request = self.call, self.request
        classes = call.service.slo_classes
        if request.service_tier is not None and request.service_tier not in classes.service_tiers:
            self.warnings.append("service_tier")
        return objectives(request, call.headers, classes, self.model, call.key, call.backend.info.policy)

    def _checked_n(self, prompts: int) -> int:
        n, limits = given(self.request.n, 1), self.call.limits
        if not 1 <= n <= limits.max_choices:
            raise bad_request(f"n must be within [1, {limits.max_choices}], got {n}", "n")
        if n * prompts > limits.max_sequences:
            raise bad_request(f"n x prompts is {n * prompts}, at most {limits.max_sequences} is allowed", "n")
        return n

    def _check_total(self, tokens_per_sample: int) -> None:
        total, limit = self.n * tokens_per_sample, self.call.limits.max_total_tokens
        if total > limit:
            message = f"n x (prompt + max_tokens) over all prompts is {total} tokens, at most {limit} are allowed"
            raise bad_request(message, "n")

    def _stream_choices(self) -> StreamChoices | None:
        request = self.request
        interval = given(request.stream_interval, 1)
        if interval < 1:
            raise bad_request("stream_interval must be at least 1", "stream_interval")
        if not request.stream:
            if request.stream_options is not None:
                raise bad_request("stream_options needs stream: true", "stream_options")
            return None
        options = request.stream_options or StreamOptions.model_validate({})
        self.warnings += [f"stream_options.{name}"[:100] for name in unknown_fields(options)]
        return StreamChoices(
            include_usage=bool(options.include_usage) or self.objectives.report,
            continuous_usage=bool(options.continuous_usage_stats),
            interval=interval,
        )


def given(value: Any, default: Any) -> Any:
    return default if value is None else value


def _checked_salt(salt: str | None) -> str:
    if salt is None:
        return ""
    if not 1 <= len(salt) <= MAX_SALT_CHARS or not _NOT_IN_SALTS.isdisjoint(salt):
        message = f"cache_salt must be 1 to {MAX_SALT_CHARS} characters without @, /, \\ or NUL"
        raise bad_request(message, "cache_salt")
    return salt
