"""From a parsed request to a `Job`: what completions and chat completions share, and what both refuse by name."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from roseinfer.core.guide import GuideSpec
from roseinfer.core.request import kept_prompt_tokens
from roseinfer.server.formats.constraints import Constrained
from roseinfer.server.formats.schemas import (
    GenerationRequest,
    LogprobsAsked,
    StreamOptions,
    fit,
    sampling_params,
    spelled_out,
    unknown_fields,
)
from roseinfer.server.http.errors import bad_request
from roseinfer.server.request.inference import Call
from roseinfer.server.request.job import Job, Prompt, StreamChoices
from roseinfer.server.request.objectives import Objectives, objectives
from roseinfer.server.request.prompts import Encoded
from roseinfer.text.output import OutputParser

MAX_SALT_CHARS = 128
_NOT_IN_SALTS = frozenset("@/\\\0")
# Fields of which any may constrain the output, or has to be named.
CONSTRAINTS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_whitespace_pattern",
    "guided_decoding_backend",
)


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
        call.set_preparation_deadline(self.objectives.first_token_by_s(call.arrival_s))
        self.stream = self._stream_choices()
        self.salt = _checked_salt(request.cache_salt)
        self.params = sampling_params(request, max_tokens, asked, call.backend.info, call.limits)
        self.guide: GuideSpec | None = None
        self.parser: Callable[[], OutputParser] | None = None
        self.tool_parser = "none"
        self.keep_last = self._kept_of_prompts(max_tokens)

    async def spell_out(self) -> None:
        """Turns `bad_words` into token ids, away from the event loop. Raises `InvalidRequestError`, `ApiError` 400."""
        if self.params.bad_words:
            service, tokenizer = self.call.service, self.call.backend.tokenizer
            self.params = await service.offload.run(spelled_out, self.params, tokenizer, self.call.limits)

    def begin_to_constrain(self) -> Constrained | None:
        """What is asked of the outputs, being proved while the prompts are made. Raises `ApiError` 400."""
        if all(getattr(self.request, name) is None for name in CONSTRAINTS):
            return None
        return Constrained(self.request, self.call.backend.grammars)

    async def constrain(self, constrained: Constrained | None) -> None:
        """Raises `InvalidRequestError`, `ApiError` 503."""
        if constrained is not None:
            self.guide, ignored = await constrained.guide()
            self.warnings += ignored

    def _kept_of_prompts(self, max_tokens: int | None) -> int | None:
        """How many of each prompt's last tokens are used, None = all; the engine need not know of it any more."""
        truncate = self.params.truncate_prompt_tokens
        if truncate is None:
            return None
        self.params = replace(self.params, truncate_prompt_tokens=None)
        context = self.call.backend.info.facts.max_model_len
        # The rest of the context is what is left, but it cannot be nothing.
        return kept_prompt_tokens(truncate, 1 if max_tokens is None else max_tokens, context)

    def job(self, api: str, id_prefix: str, encoded: list[Encoded], param: str, echo: bool = False) -> Job:
        """`api`: what logs call the kind of answer; `param`: the field that the prompt came from.

        Raises `RequestTooLongError` for a prompt that leaves no room in the context, `ApiError` 400 for too much.
        """
        call, request, promised = self.call, self.request, self.objectives
        context = call.backend.info.facts.max_model_len
        meta = promised.meta(call.arrival_s, self.salt)
        prompts = tuple(
            Prompt(
                ids=entry.ids,
                params=fit(self.params, len(entry.ids), context, param),
                meta=meta,
                text=entry.text if echo else "",
                guide=self.guide,
                parser=self.parser,
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
            report_why=promised.why,
            tool_parser=self.tool_parser,
        )

    def _checked_objectives(self) -> Objectives:
        """A tier that names no class is ignored, like any field that says nothing here."""
        call, request = self.call, self.request
        classes = call.service.slo_classes
        tier = request.service_tier
        if tier is not None and tier not in classes.service_tiers and tier not in _ANY_TIER:
            self.warnings.append("service_tier")
        return objectives(request, call.headers, classes, self.model, call.key, call.backend.info.policy)

    def _checked_n(self, prompts: int) -> int:
        n, limits = given(self.request.n, 1), self.call.limits
        if not 1 <= n <= limits.max_choices:
            raise bad_request(f"n must be within [1, {limits.max_choices}], got {n}", "n")
        most = max(limits.max_prompts, limits.max_choices)
        if n * prompts > most:
            raise bad_request(f"n x prompts is {n * prompts}, at most {most} is allowed", "n")
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
        self.warnings += ignored_stream_options(unknown_fields(options))
        return StreamChoices(
            include_usage=bool(options.include_usage) or self.objectives.report,
            continuous_usage=bool(options.continuous_usage_stats),
            interval=interval,
        )


def ignored_stream_options(extras: dict[str, Any]) -> list[str]:
    """Return warnings. `include_obfuscation: false` asks for what is done anyway."""
    if not extras:
        return []
    asked = {name for name, value in extras.items() if name != "include_obfuscation" or value is not False}
    return [f"stream_options.{name}"[:100] for name in extras if name in asked]


def given(value: Any, default: Any) -> Any:
    return default if value is None else value


def _checked_salt(salt: str | None) -> str:
    if salt is None:
        return ""
    if not 1 <= len(salt) <= MAX_SALT_CHARS or not _NOT_IN_SALTS.isdisjoint(salt):
        message = f"cache_salt must be 1 to {MAX_SALT_CHARS} characters without @, /, \\ or NUL"
        raise bad_request(message, "cache_salt")
    return salt


# --- fields that the server does not act on --------------------------------------------------------------------------
# A field whose neglect would change the answer is refused by name. Any other is accepted, and named in the warnings.
# Null, or a value that asks for nothing, is neither.
Asks = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Refusal:
    """`asks` says whether a (non-null) value asks for something; `why` completes "`field` is not supported: "."""

    why: str
    asks: Asks
    code: str = "unsupported_field"


def always(value: Any) -> bool:
    return True


def never(value: Any) -> bool:
    return False


def if_set(value: Any) -> bool:
    return bool(value)


def unless(*harmless: Any) -> Asks:
    return lambda value: all(value != known or type(value) is not type(known) for known in harmless)


def unless_listing(harmless: str) -> Asks:
    return lambda value: not isinstance(value, list) or harmless not in value


_SYNTAX = "what constrains an output is a field of structured_outputs"
_TOOLS = "tools are the fields tools and tool_choice of chats"
_REASONING = "reasoning is not told apart from the rest of the output"
_DISAGGREGATED = "prompts are not computed elsewhere"
_BEAM = "there is no beam search"
_MEDIA = "the server takes and gives text only"

REFUSALS: dict[str, Refusal] = {
    "regex": Refusal(_SYNTAX, always),
    "json_schema": Refusal(_SYNTAX, always),
    "ebnf": Refusal(_SYNTAX, always),
    "grammar": Refusal(_SYNTAX, always),
    "tools": Refusal(_TOOLS, if_set),
    "tool_choice": Refusal(_TOOLS, unless("none", "auto")),
    "functions": Refusal(_TOOLS, always),
    "function_call": Refusal(_TOOLS, unless("none")),
    "use_beam_search": Refusal(_BEAM, unless(False)),
    "length_penalty": Refusal(_BEAM, unless(1, 1.0)),
    "early_stopping": Refusal(_BEAM, unless(False)),
    "suffix": Refusal("text cannot be filled in before a suffix", if_set),
    "truncate_prompt_tokens": Refusal("this route does not cut prompts", always),  # those that do have it as a field
    "truncation_side": Refusal("truncate_prompt_tokens cuts prompts at their start", unless("left")),
    "echo": Refusal("the messages of a chat are not repeated", unless(False)),
    "documents": Refusal("documents cannot be given beside the messages", if_set),
    "return_prompt_text": Refusal("the rendered prompt is not returned", unless(False)),
    "reasoning_effort": Refusal("templates are not told how much to reason", always),
    "thinking_token_budget": Refusal(_REASONING, unless(-1)),
    "thinking_budget": Refusal(_REASONING, unless(-1)),
    "include_reasoning": Refusal("what the model thinks is always returned", unless(True)),
    "separate_reasoning": Refusal("the server's option --no-reasoning says so for all requests", unless(True)),
    "repetition_detection": Refusal("repetitions do not end the output", if_set),
    "stop_regex": Refusal("only strings and token ids end the output", if_set),
    "typical_p": Refusal("there is no typical sampling", unless(1, 1.0)),
    "n_predict": Refusal("the length of an output is max_tokens", unless(-1)),
    "max_new_tokens": Refusal("the length of an output is max_tokens", always),
    "min_new_tokens": Refusal("the least length of an output is min_tokens", unless(0)),
    "no_stop_trim": Refusal("the field is include_stop_str_in_output", unless(False)),
    "repeat_penalty": Refusal("the field is repetition_penalty", unless(1, 1.0)),
    "mirostat": Refusal("there is no mirostat sampling", unless(0)),
    "dry_multiplier": Refusal("there is no DRY sampling", unless(0, 0.0)),
    "xtc_probability": Refusal("there is no XTC sampling", unless(0, 0.0)),
    "tfs_z": Refusal("there is no tail free sampling", unless(1, 1.0)),
    "top_n_sigma": Refusal("there is no top-n-sigma sampling", unless(-1, -1.0)),
    "watermarking": Refusal("there is no watermarking", unless(False)),
    "watermark": Refusal("there is no watermarking", unless(False)),
    "logprob_token_ids": Refusal("log probabilities are those of the likeliest tokens", if_set),
    "logits_processors": Refusal("requests bring no code", if_set),
    "custom_logit_processor": Refusal("requests bring no code", if_set),
    "custom_params": Refusal("requests bring no code", if_set),
    "vllm_xargs": Refusal("there are no further arguments", if_set),
    "lora_path": Refusal("there are no adapters", if_set),
    "return_hidden_states": Refusal("hidden states are not returned", unless(False)),
    "return_routed_experts": Refusal("experts are not returned", unless(False)),
    "kv_transfer_params": Refusal(_DISAGGREGATED, if_set),
    "ec_transfer_params": Refusal(_DISAGGREGATED, if_set),
    "moderation": Refusal("answers are not moderated", always),
    "prompt_embeds": Refusal("prompts are text or token ids", always),
    "chat_template": Refusal("the server's own template is used", always),
    "modalities": Refusal(_MEDIA, unless(["text"])),
    "audio": Refusal(_MEDIA, always),
    "mm_processor_kwargs": Refusal(_MEDIA, if_set),
    "media_io_kwargs": Refusal(_MEDIA, if_set),
    "web_search_options": Refusal("there is no web search", always),
}

_UNHEARD_OF = Refusal(_SYNTAX, always)
# Fields that may be left undone, and which of their values ask for something.
HINTS: dict[str, Asks] = {
    "parallel_tool_calls": never,
    "best_of": never,  # refused below if it asks for more than `n`
    "safety_identifier": never,
    "prompt_cache_key": never,
    "prompt_cache_retention": unless("in_memory"),
    "prompt_cache_options": if_set,
    "prediction": if_set,
    "metadata": if_set,
    "store": if_set,
    "verbosity": unless("medium"),
    "spaces_between_special_tokens": unless(True),
}
# Service tiers that leave the choice to the server.
_ANY_TIER = frozenset({"auto", "default", "standard_only"})


def check_extras(extras: dict[str, Any], n: int = 1) -> list[str]:
    """Names of the fields that are ignored. Raises `ApiError` 400 for those that may not be. `n`: samples."""
    if not extras:
        return []
    ignored = []
    for name, value in extras.items():
        refusal = REFUSALS.get(name) or (_UNHEARD_OF if name.startswith("guided_") else None)
        if refusal is not None and refusal.asks(value):
            raise bad_request(f"{name} is not supported: {refusal.why}", name, refusal.code)
        if refusal is None and HINTS.get(name, always)(value):
            ignored.append(name[:100])
    _check_best_of(extras.get("best_of"), n)
    return ignored


def _check_best_of(best_of: Any, n: int) -> None:
    if best_of is not None and (type(best_of) is not int or best_of != n):
        message = f"best_of is not supported beyond n: all samples are returned, so it can only be {n} here"
        raise bad_request(message, "best_of", "unsupported_field")
