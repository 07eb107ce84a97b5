"""Interface of runners, which execute plans, and the base class of their wrappers."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from roseinfer.core.adapters import AdapterPool
from roseinfer.core.plan import StepLimits, StepPlan, StepResult, TokenMasks
from roseinfer.core.pooling import PoolingInfo


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """Routing of a model with experts: in each such layer every token is computed by `top_k` of `count` experts."""

    count: int
    top_k: int

    def read(self, tokens: float) -> float:
        """Return the mean number of distinct experts that a layer reads for `tokens` tokens (may be inf).

        The formula `count * (1 - (1 - top_k / count) ** tokens)` assumes that tokens choose independently and prefer
        no expert.
        """
        return self.count * (1 - (1 - self.top_k / self.count) ** tokens)


@dataclass(frozen=True, slots=True)
class ContextReads:
    """Tokens of a context that a row reads, in tokens of the K/V of all layers.

    `windows`: for layers that see only the last tokens, their window and their share of the bytes of K/V.
    `state_tokens`: tokens whose K/V has as many bytes as a step reads and writes of one recurrent state.
    """

    windows: tuple[tuple[int, float], ...] = ()
    state_tokens: float = 0.0

    def of(self, *contexts: float) -> float:
        """Return the tokens that decoding rows with these contexts read, one row for each."""
        return sum(contexts) - (self._unseen(contexts) if self.windows else 0)

    def _unseen(self, contexts: Iterable[float]) -> float:
        return sum([share * (n - window) for window, share in self.windows for n in contexts if n > window])


WHOLE_CONTEXT = ContextReads()


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Optional features of a runner. The scheduler plans nothing that needs a missing one.

    `drafts`: verifies rows with drafts. `masks`: samples under `TokenMasks`. `logprobs`: returns log probabilities of
    sampled tokens and of prompts. `ahead`: has a draft head, so plans may have `StepPlan.ahead`. The first row of a
    request then begins one token before the first that it writes, if there is one: the head needs that token's state.
    """

    drafts: bool = False
    masks: bool = False
    logprobs: bool = False
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class WindowPool:
    """KV blocks of a group whose layers see only the last `window` tokens, the query's own included."""

    window: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class StatePool:
    """Slots for the recurrent states of sequences, of `slot_bytes` each over all layers and ranks."""

    num_slots: int
    slot_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSizes:
    """Blocks and slots that a scheduler may use.

    `num_blocks`: KV blocks of the first group. `spare_from`: first of those that are used only if no other is free,
    None = no such blocks. `num_host_blocks`: KV blocks in host memory, used if prefixes are cached; 0 = plans may not
    have loads or stores. `num_host_slots`: slots for states in host memory, used beside such blocks; 0 = states have no
    loads or stores. `windows`: the KV groups after the first, in the order of `StepPlan.groups`. `states`: the state
    group of a model that has recurrent states.
    """

    num_blocks: int
    block_size: int
    prefix_caching: bool = True
    spare_from: int | None = None
    num_host_blocks: int = 0
    num_host_slots: int = 0
    windows: tuple[WindowPool, ...] = ()
    states: StatePool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerFacts(KvSizes):
    """Facts found while building a runner. `model_type`: the architecture that config.json names.

    `dtype`: type of computations. `weights`: format of the weights of linear layers. `limits`: maximum size of a step.
    `default_sampling`: sampling fields set by generation_config.json. `startup_s`: seconds per start-up phase.
    `load_s`, `store_s`: seconds per block copied from and to host memory, measured at the start. `experts`: routing of
    a model with experts, None without. `block_bytes`: size of a KV block in either memory; 0 = unknown. `pooling`: set
    if the runner serves prompt-only requests and no others. `keeps_kv`: False if no K/V is kept, so that KV blocks
    exist in plans only. `adapters`: slots for LoRA adapters; None = plans use none. `reads`: what rows read of their
    contexts.
    """

    model_type: str
    max_model_len: int
    limits: StepLimits
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    weights: str
    device: str
    default_sampling: dict[str, float | int]
    startup_s: dict[str, float]
    load_s: float = 0.0
    store_s: float = 0.0
    experts: ExpertChoice | None = None
    block_bytes: int = 0
    pooling: PoolingInfo | None = None
    keeps_kv: bool = True
    adapters: AdapterPool | None = None
    reads: ContextReads = WHOLE_CONTEXT

    @property
    def slot_blocks(self) -> float:
        """KV blocks that are as large as a slot of recurrent states; 0 if there are none."""
        return self.states.slot_bytes / self.block_bytes if self.states is not None and self.block_bytes else 0.0


class Runner(Protocol):
    """Executes plans in the order submitted; `submit`, then `sample`, then `collect`, each once per plan.

    A handle is any value by which the runner finds the step again. An exception from any call is a failure of the
    engine. An error caused by one request becomes the error of that row's result instead.
    """

    @property
    def capabilities(self) -> Capabilities:
        """Return the optional features; constant."""
        ...

    def submit(self, plan: StepPlan) -> Any:
        """Launch the forward pass."""
        ...

    def mask_space(self, lines: int) -> memoryview:
        """Return a buffer for the words of `lines` masks of the next sampled plan (see `TokenMasks`). Its content is
        undefined.
        """
        ...

    def sample(self, handle: Any, masks: TokenMasks | None = None) -> None:
        """Launch the sampling. Later plans use the sampled tokens as inputs without a round trip to the host.

        `masks`: those of the plan's `guided` rows, required if there are any. Their words begin where those of the last
        `mask_space` do. The forward pass runs while the host makes them.
        """
        ...

    def collect(self, handle: Any) -> StepResult:
        """Wait for the step."""
        ...

    def close(self) -> None:
        """Release resources after the last step."""
        ...


class PassThrough:
    """Runner that forwards all calls to another one. Wrappers override only the calls that they change."""

    def __init__(self, inner: Runner) -> None:
        self.inner = inner

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def submit(self, plan: StepPlan) -> Any:
        return self.inner.submit(plan)

    def mask_space(self, lines: int) -> memoryview:
        return self.inner.mask_space(lines)

    def sample(self, handle: Any, masks: TokenMasks | None = None) -> None:
        self.inner.sample(handle, masks)

    def collect(self, handle: Any) -> StepResult:
        return self.inner.collect(handle)

    def close(self) -> None:
        self.inner.close()
