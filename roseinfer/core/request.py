"""Requests: what a client sends, and the scheduler's state of each sample."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from roseinfer.core.adapters import Adapter
from roseinfer.core.errors import InvalidRequestError, RequestTooLongError
from roseinfer.core.guide import GuideSpec
from roseinfer.core.pooling import PoolingParams
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Cause, Slo


def check_context(prompt_len: int, max_tokens: int, max_model_len: int) -> None:
    """Raise `RequestTooLongError` if prompt and output together exceed the context (all in tokens)."""
    if prompt_len + max_tokens <= max_model_len:
        return
    if prompt_len + min(1, max_tokens) > max_model_len:
        room = ", which leaves no room for an output" if max_tokens else ""
        raise context_error(max_model_len, f"the prompt has {prompt_len} tokens{room}", prompt_tokens=prompt_len)
    asked = f"{prompt_len + max_tokens} tokens were asked for: {prompt_len} in the prompt and {max_tokens} of output"
    raise context_error(max_model_len, asked)


def context_error(
    max_model_len: int, but: str, param: str = "prompt", prompt_tokens: int | None = None
) -> RequestTooLongError:
    """Return the error of a request that exceeds the context of `max_model_len` tokens; `but` completes "However, ".

    `prompt_tokens`: minimum length of the prompt. Clients recognise the error by its first words, then shorten the
    prompt or use another model. LiteLLM looks for "this model's maximum context length is" in any case, others for
    "maximum context length is N tokens".
    """
    message = f"This model's maximum context length is {max_model_len} tokens. However, {but}."
    return RequestTooLongError(message, param, max_model_len, prompt_tokens)


def kept_prompt_tokens(truncate: int | None, max_tokens: int, max_model_len: int) -> int | None:
    """Return how many of a prompt's last tokens `truncate_prompt_tokens` keeps; None = all of them.

    -1 keeps as many as leave room for `max_tokens`, at least one. Raise `InvalidRequestError` for values above the
    context.
    """
    if truncate is not None and truncate > max_model_len:
        message = f"truncate_prompt_tokens is {truncate}, above the context of {max_model_len} tokens"
        raise InvalidRequestError(message, "truncate_prompt_tokens")
    return max(1, max_model_len - max_tokens) if truncate == -1 else truncate


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMeta:
    """Properties of a request besides its tokens and sampling parameters. Made once on arrival, then passed on
    unchanged.

    Times are in seconds on the machine's monotonic clock. `arrival_s`: None = when the engine receives it. `slo`: its
    objectives; None or empty = best effort. `deadline_s`: when it ends with `TIMEOUT`, whatever its output; a limit,
    where an objective is a target. `tenant`: account that it belongs to. `priority`: lower runs sooner, under policies
    that use priorities. `predicted_len`: predicted output tokens. `hinted`: the client made that prediction, which may
    be wrong or self-serving. `cache_salt`: only requests with the same salt share cached prefixes; it contains no NUL.
    `adapter`: LoRA adapter that computes it; None = the model itself.
    """

    arrival_s: float | None = None
    slo: Slo | None = None
    deadline_s: float | None = None
    tenant: str = ""
    priority: int = 0
    predicted_len: int | None = None
    hinted: bool = False
    cache_salt: str = ""
    adapter: Adapter | None = None

    @property
    def prefix_scope(self) -> str:
        """Return the salt of its cached prefixes: only requests with the same one share them.

        It names the adapter by its content. No salt contains NUL, so none equals a salt with an adapter.
        """
        return self.cache_salt if self.adapter is None else f"{self.cache_salt}\0{self.adapter.digest}"


NO_META = RequestMeta()


@dataclass(frozen=True, slots=True)
class Prompt:
    """Input of a request as it travels, unchanged, from the server to the engine.

    `params` are those that the engine understands: see `prepare`. `guide`: constraint of the outputs; None without.
    `pooling`: set for a prompt-only request, whose `params` are then `NO_OUTPUT`. `prediction`: tokens that the client
    expects as output; they change nothing but the time that it takes. `generation_prompt_len`: how many of the last
    tokens the chat template added to open the answer; a later turn may have others there.
    """

    ids: list[int]
    params: SequenceParams
    meta: RequestMeta = NO_META
    guide: GuideSpec | None = None
    pooling: PoolingParams | None = None
    prediction: tuple[int, ...] = ()
    generation_prompt_len: int = 0


def sequence_id(request_id: str, index: int) -> str:
    """Return the engine's id of sample `index` of a request."""
    return f"{request_id}:{index}"


def request_id_of(sequence: str) -> str:
    """Return the id of the request whose sample has the id `sequence`."""
    return sequence.rpartition(":")[0]


class Status(IntEnum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2


class Request:
    """Scheduler's state of one sample of a request: known tokens, computed tokens, and tokens in flight.

    `request_id` is the sample's id here ("x:0", see `sequence_id`). In `Add`, `Invalid` and `LiveRequest` it is the id
    of the whole request ("x").

    `tokens` are the known tokens: the prompt, then the outputs the host has seen. `computed` tokens have their K/V in
    the cache. `planned` counts those and the tokens of submitted steps. `pending` tokens are sampled by submitted steps
    and not seen yet. `in_flight` is the number of submitted steps that name the request. So `len(tokens) + pending -
    planned` tokens are left to compute. This is the whole state machine: a chunked prompt, a decode and a restart after
    preemption differ only in these numbers.

    Policies read fields of `meta` in every step, so they are attributes here as well; `slo` is None if no objective is
    set. `guided`: its tokens are sampled under masks that the host makes for each of them. `keys`: keys of the prompt's
    full blocks, if the sender computed them. `resumed`: it came with output of another engine, its own or that of
    another sample of its request. It continues like a preempted request; a moved request without output is new.
    `loading`: what is loaded before it can start: K/V of its prefix (`Cause.LOAD`) or its adapter (`Cause.ADAPTER`).
    `waited`: seconds by cause before the scheduler received it. `chunks`: rows of its prompt, and other rows of several
    tokens, drafts aside. `rowless`: planned tokens that took no row of their own, so `planned - rowless` is the number
    of rows since it took its seat. `pooling`: set for a prompt-only request. `pools_prompt`: its vector needs the
    hidden states of the whole prompt.
    """

    __slots__ = (
        "arrival_s",
        "cached_tokens",
        "capacity",
        "chunks",
        "computed",
        "deadline_s",
        "first_token_s",
        "fork_of",
        "generation_prompt_len",
        "guided",
        "hinted",
        "in_flight",
        "keys",
        "loading",
        "max_len",
        "meta",
        "params",
        "pending",
        "planned",
        "pooling",
        "pools_prompt",
        "predicted_len",
        "prediction",
        "preemptions",
        "priority",
        "prompt_len",
        "prompt_scored",
        "request_id",
        "resumed",
        "rowless",
        "scheduled_s",
        "seat",
        "seed",
        "slo",
        "status",
        "stop_ids",
        "tenant",
        "tokens",
        "waited",
        "write_from",
    )

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        *,
        seed: int = 0,
        stop_ids: frozenset[int] = frozenset(),
        fork_of: str | None = None,
    ) -> None:
        if not prompt.ids:
            raise InvalidRequestError("the prompt is empty", "prompt")
        params, meta = prompt.params, prompt.meta
        self.request_id = request_id
        self.tokens = list(prompt.ids)
        self.prompt_len = len(prompt.ids)
        self.params = params
        self.seed = seed
        self.stop_ids = stop_ids
        self.fork_of = fork_of
        self.meta = meta
        self.arrival_s = meta.arrival_s or 0.0
        self.slo = meta.slo.for_output(params.max_tokens) if meta.slo is not None else None
        self.deadline_s = meta.deadline_s
        self.tenant = meta.tenant
        self.priority = meta.priority
        self.predicted_len = meta.predicted_len
        self.pooling = prompt.pooling
        self.prediction = prompt.prediction
        self.generation_prompt_len = prompt.generation_prompt_len
        self.pools_prompt = False
        self.guided = prompt.guide is not None and prompt.guide.constrains
        self.hinted = meta.hinted
        # With max_tokens = 0 one token is still sampled at the end of the prompt; commit drops it.
        self.max_len = self.prompt_len + max(1, params.max_tokens)
        self.status = Status.WAITING
        self.keys: Sequence[bytes] = ()
        self.resumed = False
        self.loading: Cause | None = None
        self.seat: int | None = None
        self.computed = 0
        self.planned = 0
        self.pending = 0
        self.in_flight = 0
        self.capacity = 0
        self.write_from = 0
        self.cached_tokens = 0
        self.prompt_scored = 0  # prompt positions whose log probabilities were reported
        self.preemptions = 0
        self.waited: Mapping[Cause, float] = {}
        self.chunks = 0
        self.rowless = 0
        self.scheduled_s = 0.0
        self.first_token_s = 0.0

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def needs_every_position(self) -> bool:
        """True if a result needs every position of the prompt: a vector, or log probabilities not reported yet."""
        if self.pools_prompt:
            return True
        return self.params.prompt_logprobs is not None and self.prompt_scored < self.prompt_len - 1

    @property
    def remaining(self) -> int:
        """Return the tokens to compute before the next one can be sampled; 0 if the last allowed one is in flight."""
        ahead = len(self.tokens) + self.pending
        return 0 if ahead >= self.max_len else ahead - self.planned

    @property
    def has_run(self) -> bool:
        """True if it has run here, or is resumed. It then waits to continue and cannot be rejected any more."""
        return self.preemptions > 0 or self.resumed

    def resume(self, token_ids: Sequence[int], ttft_s: float) -> None:
        """Continue after these outputs of another engine, the first of which came `ttft_s` seconds after the arrival.

        Raise `InvalidRequestError` if the outputs are already complete.
        """
        self.resumed = True
        if not token_ids:
            return
        if len(token_ids) >= self.params.max_tokens or token_ids[-1] in self.stop_ids:
            raise InvalidRequestError("the outputs to resume after are already complete", "outputs")
        self.tokens += token_ids
        self.prompt_scored = self.prompt_len - 1
        self.first_token_s = self.arrival_s + ttft_s

    def reset_computed(self) -> None:
        """Reset what was computed, because its seat and blocks were released."""
        assert self.in_flight == 0 and self.pending == 0, "a submitted step names the request"
        self.computed = self.planned = self.capacity = self.write_from = 0
        self.seat = None
        self.status = Status.WAITING

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, prompt={self.prompt_len}, outputs={self.num_outputs}, "
            f"planned={self.planned}, pending={self.pending}, in_flight={self.in_flight})"
        )
