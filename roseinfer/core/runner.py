"""Who executes plans: what every runner offers, and the one place through which wrappers hand calls on."""

from dataclasses import dataclass
from typing import Any, Protocol

from roseinfer.core.experts import ExpertChoice
from roseinfer.core.plan import StepLimits, StepPlan, StepResult, TokenMasks


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a runner can do beyond computing rows and sampling one token of each. What it cannot do is never planned.

    `drafts`: it verifies rows that carry drafts. `masks`: it samples among the tokens that `TokenMasks` allow.
    `logprobs`: it has log probabilities, of sampled tokens and of prompts.
    """

    drafts: bool = False
    masks: bool = False
    logprobs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerFacts:
    """What was found out while building. `model_type` is the architecture that config.json names.

    `dtype` is computed in, `weights` says what the weights of linear layers are kept as.
    `limits`: what the runner has room for in a step; plans keep within them. `spare_from`: the first of the KV blocks
    that are used only if no other is free, None if there are no such. `default_sampling` holds the sampling fields that
    generation_config.json sets, `startup_s` seconds per phase. `num_host_blocks`: KV blocks in host memory, 0 if plans
    may have no loads and stores; `load_s` and `store_s`: seconds for one block, as measured at the start. `experts`:
    how the model chooses among them, None if it has none. `block_bytes`: what a KV block takes,
    in either memory; 0 if nobody knows.
    """

    model_type: str
    max_model_len: int
    num_blocks: int
    spare_from: int | None
    limits: StepLimits
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    weights: str
    device: str
    default_sampling: dict[str, float | int]
    startup_s: dict[str, float]
    num_host_blocks: int = 0
    load_s: float = 0.0
    store_s: float = 0.0
    experts: ExpertChoice | None = None
    block_bytes: int = 0


class Runner(Protocol):
    """Executes plans in the order submitted; `submit`, then `sample`, then `collect`, each once per plan.

    A handle is whatever the runner needs to find the step again. An exception from any call is a failure of the engine;
    what can be pinned to one request becomes the error of that row's result instead.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What plans may ask of this runner; it does not change."""
        ...

    def submit(self, plan: StepPlan) -> Any:
        """Launch the forward pass."""
        ...

    def mask_space(self, lines: int) -> memoryview:
        """Room for the words of so many masks of the next plan that is sampled, see `TokenMasks`; it holds anything."""
        ...

    def sample(self, handle: Any, masks: TokenMasks | None = None) -> None:
        """Launch the sampling; the sampled tokens are inputs of later plans without passing the host.

        `masks` are those of the plan's `guided` rows, and given whenever there are such rows; their words begin where
        those of the last `mask_space` do. The forward pass runs while the host makes them.
        """
        ...

    def collect(self, handle: Any) -> StepResult:
        """Wait for the step."""
        ...

    def close(self) -> None:
        """There will be no more steps."""
        ...


class PassThrough:
    """A runner that hands every call on to another. A wrapper overrides the calls that it looks at, and only those."""

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
