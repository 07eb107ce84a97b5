"""Request bodies: their fields, types and bounds, which are also the OpenAPI document's.

Null means "not given" everywhere. Unknown fields are kept apart and named in `warnings`.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from roseinfer.core.sampling import INT64_MAX, INT64_MIN, RANGES
from roseinfer.grammar.limits import MAX_CHOICES, MAX_REGEX_BYTES
from roseinfer.server.http.middleware import MAX_ID_CHARS
from roseinfer.server.http.request_models import FollowsOptions, RequestModel
from roseinfer.server.request.models import ModelField

# Only bounds the cost of parsing, far above `Limits`. Plain lists of token ids cost little.
MAX_ITEMS = 65536
# For lists of objects, which cost more. Below `Limits.max_json_objects`, for an error that names the field.
MAX_OBJECTS = 16000
MAX_SALT_CHARS = 128
MAX_PREDICTED_LEN = 2**31 - 1


def _at_most(limit: str) -> FollowsOptions:
    """Bound the length of a list or dictionary by a field of `Limits`."""
    return FollowsOptions(lambda limits: {"max_length": getattr(limits, limit)})


def _in_range(name: str) -> Any:
    """Return the bounds that `SequenceParams` sets for a number."""
    low, high, above = RANGES[name]
    return Field(gt=low, le=high) if above else Field(ge=low, le=high)


def _documented(**schema: Any) -> Any:
    """Return bounds for the OpenAPI document that are enforced with an error of their own."""
    return Field(json_schema_extra=schema)


def _short(value: Any) -> Any:
    """Reject a long dictionary before pydantic reports an error for each wrong entry."""
    if isinstance(value, dict) and len(value) > MAX_ITEMS:
        raise ValueError(f"Dictionary should have at most {MAX_ITEMS} items, not {len(value)}")
    return value


def _not_tiny(value: float) -> float:
    """Reject a positive number that would be 0 in seconds instead of milliseconds."""
    if value / 1000 == 0:
        raise ValueError("Input should be greater than 0")
    return value


# `fail_fast`: a long list of wrong entries must not cost an error each.
# Token ids are checked against the vocabulary later, all at once.
TokenId = Annotated[int, _documented(minimum=0)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, description="token ids within the vocabulary")]
PromptIds = Annotated[TokenIds, Field(min_length=1)]
Strings = Annotated[list[str], Field(fail_fast=True, max_length=MAX_ITEMS)]
StopString = Annotated[str, Field(min_length=1), FollowsOptions(lambda limits: {"max_length": limits.max_stop_chars})]
StopStrings = Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_ITEMS), _at_most("max_stop_strings")]
Words = Annotated[list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True, max_length=MAX_ITEMS)]
Prompts = FollowsOptions(lambda limits: {"max_length": limits.max_prompts})
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_OBJECTS)]
Biases = Annotated[
    dict[str, Annotated[float, _in_range("logit_bias")]],
    _documented(propertyNames={"pattern": "^[0-9]{1,12}$"}),
    _at_most("max_logit_bias"),
    BeforeValidator(_short),
]
AlternativeCount = Annotated[
    int,
    FollowsOptions(lambda limits: {"ge": -1} if limits.max_logprobs == -1 else {"ge": 0, "le": limits.max_logprobs}),
]
Temperature = Annotated[float, _in_range("temperature")]
TopP = Annotated[float, _in_range("top_p")]
MinP = Annotated[float, _in_range("min_p")]
Penalty = Annotated[float, _in_range("presence_penalty")]
RepetitionPenalty = Annotated[float, _in_range("repetition_penalty")]
Int64 = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), AfterValidator(_not_tiny)]
Count = Annotated[int, Field(ge=1)]
ThinkingBudget = Annotated[int, Field(ge=-1)]
RequestId = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS, pattern="^[!-~]*$")]
# As the engine checks them, with a message of its own.
MAX_ADAPTER_NAME_CHARS, MAX_ADAPTER_PATH_CHARS = 256, 4096
CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS, pattern=r"^[^@/\\\x00]*$")]
RegexText = Annotated[str, _documented(maxLength=MAX_REGEX_BYTES)]
ChoiceTexts = Annotated[Strings, _documented(minItems=1, maxItems=MAX_CHOICES)]


# Config of models that are parsed without a `RequestParser` too: a request would wait while they are built.
_BUILT_AT_IMPORT = ConfigDict(defer_build=False)


class StreamOptions(RequestModel):
    model_config = _BUILT_AT_IMPORT

    include_usage: bool | None = Field(None, description="send the usage in a last chunk of its own")
    continuous_usage_stats: bool | None = Field(None, description="send the usage so far in every chunk")


class SloFields(RequestModel):
    """Latency objectives. Unknown names are rejected: ignoring one would break a promise."""

    model_config = ConfigDict(extra="forbid", strict=True)

    ttft_ms: Positive | None = Field(None, description="from arrival to the first token")
    tpot_ms: Positive | None = Field(None, description="mean time per token after the first")
    e2e_ms: Positive | None = Field(None, description="from arrival to the last token")
    class_: str | None = Field(None, alias="class", description="a class of the server; 'none' = best effort")
    report: bool | None = Field(None, description="report measured latencies in usage.slo; default false")
    why: bool | None = Field(None, description="also explain them there; default false")


class JsonSchemaFormat(RequestModel):
    name: str | None = Field(None, description="required: 1 to 64 letters, digits, '_' or '-'")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="required: a JSON schema")
    strict: bool | None = Field(None, description="reject what cannot be enforced; default: ignore it, with a warning")
    description: str | None = Field(None, description="accepted, not used")


class ResponseFormat(RequestModel):
    type: str = Field(description="text, json_object, json_schema or structural_tag")
    json_schema: JsonSchemaFormat | None = Field(None, description="of type json_schema")
    format: dict[str, Any] | None = Field(None, description="of type structural_tag: a tree of nodes")
    structures: Objects | None = Field(None, description="of type structural_tag: {begin, schema, end}, several")
    triggers: Strings | None = Field(None, description="of type structural_tag: texts that start structures")


class StructuredOutputs(RequestModel):
    """Constraint of the output: exactly one of the first six."""

    model_config = _BUILT_AT_IMPORT

    json_: str | dict[str, Any] | None = Field(
        None, alias="json", description="a JSON schema, or a text that holds one"
    )
    regex: RegexText | None = Field(None, description="a regular expression that the text matches as a whole")
    choice: ChoiceTexts | None = Field(None, description="texts, one of which is the output")
    grammar: str | None = Field(None, description="a grammar in Lark, or in GBNF if there is a '::=' in it")
    json_object: bool | None = Field(None, description="true: any JSON object")
    structural_tag: str | dict[str, Any] | None = Field(None, description="as in response_format")
    whitespace_pattern: str | None = Field(
        None, description="pattern between the tokens of JSON; default: up to 32 characters of white space"
    )
    disable_any_whitespace: bool | None = Field(None, description="no white space between the tokens of JSON")
    disable_additional_properties: bool | None = Field(None, description="default additionalProperties to false")


class PredictedOutput(RequestModel):
    """Text that the client expects as output."""

    type: Literal["content"] = Field(description="content")
    content: str | Objects = Field(description="text, or parts of type 'text'")


class SchedulingFields(ModelField):
    """Fields of all APIs: objectives and scheduling terms."""

    slo: SloFields | None = Field(None, description="latency objectives; default: the class's")
    ttft: Positive | None = Field(None, description="like slo.ttft_ms")
    timeout_s: Positive | None = Field(None, description="seconds from arrival after which the request ends")
    deadline_ms: Positive | None = Field(None, description="like timeout_s, in milliseconds")
    service_tier: str | None = Field(None, description="selects a class, if the server's file maps it")
    priority: Int64 | None = Field(None, description="lower is sooner; only with policies that support priorities")
    cache_salt: CacheSalt | None = Field(None, description="only requests with the same salt share cached prefixes")
    request_id: RequestId | None = Field(None, description="used if there is no X-Request-Id header")


class OneAnswerRequest(SchedulingFields):
    """Fields of all APIs that generate text: sampling and delivery."""

    min_tokens: Annotated[int, Field(ge=0)] | None = Field(None, description="no end of text before; default 0")
    temperature: Temperature | None = Field(None, description="0 (greedy) to 2; default 1")
    top_p: TopP | None = Field(None, description="above 0, up to 1; default 1")
    top_k: Annotated[int, Field(ge=-1, le=INT64_MAX)] | None = Field(None, description="-1 or 0 = off (default)")
    min_p: MinP | None = Field(None, description="0 (default) to 1")
    frequency_penalty: Penalty | None = Field(None, description="-2 to 2; default 0")
    presence_penalty: Penalty | None = Field(None, description="-2 to 2; default 0")
    repetition_penalty: RepetitionPenalty | None = Field(None, description="above 0; default 1")
    seed: Int64 | None = Field(None, description="signed 64 bit; sample i of a prompt draws with seed + i")
    stop_token_ids: Annotated[TokenIds, _at_most("max_stop_token_ids")] | None = Field(
        None, description="token ids that end the text"
    )
    include_stop_str_in_output: bool | None = Field(None, description="keep the stop string; default false")
    ignore_eos: bool | None = Field(None, description="continue after end-of-text tokens; default false")
    logit_bias: Biases | None = Field(None, description="token id -> -100 to 100")
    bad_words: Annotated[Words, _at_most("max_bad_words")] | None = Field(
        None, description="words that the output must not contain, as tokenized"
    )
    allowed_token_ids: Annotated[PromptIds, _at_most("max_allowed_token_ids")] | None = Field(
        None, description="only these are sampled; default: all"
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1), _documented(**{"not": {"const": 0}})] | None = Field(
        None, description="number of the prompt's last tokens to use; -1 = as many as leave room for max_tokens"
    )
    stream: bool | None = Field(None, description="answer as server-sent events")
    stream_interval: Count | None = Field(None, description="minimum tokens per chunk; default 1")
    tpot: Positive | None = Field(None, description="like slo.tpot_ms")
    pred_output_len: Annotated[int, Field(ge=1, le=MAX_PREDICTED_LEN)] | None = Field(
        None, description="output tokens that the client expects"
    )
    add_special_tokens: bool | None = Field(None, description="default: true for a prompt, false for messages")
    skip_special_tokens: bool | None = Field(None, description="leave special tokens out of the text; default true")


class GenerationRequest(OneAnswerRequest):
    """Fields of completions and chat completions."""

    n: Annotated[int, Field(ge=1), FollowsOptions(lambda limits: {"le": limits.max_choices})] | None = Field(
        None, description="samples per prompt; default 1"
    )
    stop: StopString | StopStrings | None = Field(None, description="strings that end the text")
    prompt_logprobs: AlternativeCount | None = Field(None, description="alternatives per prompt token; not with stream")
    stream_options: StreamOptions | None = Field(None, description="only with stream")
    return_token_ids: bool | None = Field(None, description="return the token ids of prompt and output too")
    return_tokens_as_token_ids: bool | None = Field(None, description="name tokens 'token_id:N' in logprobs")
    user: str | None = Field(None, description="accepted, not used")
    response_format: ResponseFormat | None = Field(None, description="format of the output; default: free text")
    structured_outputs: StructuredOutputs | None = Field(None, description="constraint of the output")
    guided_json: str | dict[str, Any] | None = Field(None, description="like structured_outputs.json")
    guided_regex: RegexText | None = Field(None, description="like structured_outputs.regex")
    guided_choice: ChoiceTexts | None = Field(None, description="like structured_outputs.choice")
    guided_grammar: str | None = Field(None, description="like structured_outputs.grammar")
    guided_whitespace_pattern: str | None = Field(None, description="like structured_outputs.whitespace_pattern")
    guided_decoding_backend: str | None = Field(None, description="accepted, not used")


class CompletionRequest(GenerationRequest):
    prompt: (
        str
        | PromptIds
        | Annotated[Strings, Field(min_length=1), Prompts]
        | Annotated[list[PromptIds], Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS), Prompts]
    ) = Field(description="text or token ids, one or several")
    max_tokens: Annotated[int, Field(ge=0)] | None = Field(
        None, description="default 16; 0 only with echo, to score the prompt"
    )
    logprobs: AlternativeCount | None = Field(None, description="alternatives per token")
    echo: bool | None = Field(None, description="put the prompt before the text; default false")


Tools = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class ChatMessage(RequestModel):
    role: str
    content: str | Objects | None = Field(None, description="text, or parts of type 'text'; null beside tool_calls")
    name: str | None = None
    tool_calls: Objects | None = Field(None, description="an assistant's: {id, type, function: {name, arguments}}")
    tool_call_id: str | None = Field(None, description="the call that a message of role 'tool' answers")
    reasoning_content: str | None = Field(None, description="reasoning of the assistant")
    reasoning: str | None = Field(None, description="like reasoning_content")
    refusal: str | None = Field(None, description="an assistant's text if there is no content")


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_OBJECTS)]


class MessagesFields(RequestModel):
    """Messages and the options of the chat template."""

    messages: Messages
    add_generation_prompt: bool | None = Field(None, description="default true")
    continue_final_message: bool | None = Field(None, description="continue the last message; default false")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables that the template reads")


class ChatRequest(MessagesFields, GenerationRequest):
    model_config = _BUILT_AT_IMPORT

    max_tokens: Count | None = Field(None, description="default: the rest of the context")
    max_completion_tokens: Count | None = Field(None, description="takes precedence over max_tokens")
    logprobs: bool | None = Field(None, description="return log probabilities; default false")
    top_logprobs: AlternativeCount | None = Field(None, description="alternatives per token; needs logprobs")
    tools: Tools | None = Field(None, description="{type: function, function: {name, parameters, strict}}")
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="none, auto (default), required, one function, or allowed_tools"
    )
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most; default true")
    reasoning_effort: str | None = Field(None, description="'none': no reasoning, if the template supports it")
    thinking_token_budget: ThinkingBudget | None = Field(None, description="reasoning tokens; -1 (default) = unlimited")
    thinking_budget: ThinkingBudget | None = Field(None, description="like thinking_token_budget")
    prediction: PredictedOutput | None = Field(
        None, description="expected output, which makes it faster where it is right, if the engine speculates"
    )


class TokenizeRequest(ModelField):
    prompt: str | None = Field(None, description="either this or messages")
    messages: Messages | None = None
    tools: Tools | None = Field(None, description="with messages: as in chats")
    add_special_tokens: bool | None = Field(None, description="default: true for a prompt, false for messages")
    add_generation_prompt: bool | None = Field(None, description="default true")
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


AdapterName = Annotated[str, Field(min_length=1, max_length=MAX_ADAPTER_NAME_CHARS)]
AdapterPath = Annotated[str, Field(min_length=1, max_length=MAX_ADAPTER_PATH_CHARS)]


class LoadAdapterRequest(ModelField):
    name: AdapterName = Field(description="name that requests use as their model; another adapter of it is replaced")
    path: AdapterPath = Field(description="folder on the engine's host, relative to --lora-dir or below it")


class VllmLoadAdapterRequest(ModelField):
    """Body of vLLM's route."""

    lora_name: AdapterName
    lora_path: AdapterPath
    load_inplace: bool | None = Field(None, description="replace another adapter of this name; default false")
    is_3d_lora_weight: bool | None = None


class VllmUnloadAdapterRequest(ModelField):
    """Body of vLLM's route."""

    lora_name: AdapterName
    lora_int_id: int | None = None


class DetokenizeRequest(ModelField):
    tokens: TokenIds
