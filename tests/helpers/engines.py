"""Engine cores over the fake runner, and a loop that runs them dry with the integrity check on."""

from roseinfer.core.adapters import Adapter
from roseinfer.core.clock import ManualClock
from roseinfer.core.guide import GuideSpec
from roseinfer.core.outputs import End, FinishReason, SequenceOutput
from roseinfer.core.plan import StepLimits, StepPlan
from roseinfer.core.pooling import PoolingInfo
from roseinfer.core.request import Prompt, RequestMeta
from roseinfer.core.runner import StatePool, WindowPool
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Slo
from roseinfer.engine.adapters import AdapterRegistry
from roseinfer.engine.core import EngineCore
from roseinfer.engine.guided.guide import GuideFactory
from roseinfer.engine.messages import Add
from roseinfer.sched.adapters import AdapterSlots
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.drafting.drafting import Drafting
from roseinfer.sched.drafting.proposer import Proposer
from roseinfer.sched.offload import OffloadCosts
from roseinfer.sched.registry import make_policy, scheduler_config
from roseinfer.sched.scheduler import Scheduler
from tests.helpers.drafters import every_draft_of
from tests.helpers.fake_runner import FakeRunner
from tests.helpers.kv_managers import kv_manager

EOS = 3
ALWAYS = OffloadCosts(CostModel(CostParams(token_s=1.0), fit=False), learns=False)


def make_core(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    depth: int = 1,
    prefix_caching: bool = True,
    max_model_len: int | None = None,
    runner: FakeRunner | None = None,
    vocab_size: int = 50,
    drafter: Proposer | None = None,
    drafting: Drafting | None = None,
    engine: type[EngineCore] = EngineCore,
    guides: GuideFactory | None = None,
    num_host_blocks: int = 0,
    offloading: OffloadCosts | None = None,
    pooling: PoolingInfo | None = None,
    windows: tuple[WindowPool, ...] = (),
    num_slots: int = 0,
    adapters: AdapterSlots | None = None,
    registry: AdapterRegistry | None = None,
    num_host_slots: int = 0,
    **scheduler: object,
) -> EngineCore:
    """Make a core. `drafter`: all that it proposes is verified. With blocks in host memory, all stored blocks are
    loaded, unless `offloading` sets their costs.
    """
    config = scheduler_config(**{"max_num_seqs": 8, "max_num_batched_tokens": 32, **scheduler})
    context = max_model_len or num_blocks * block_size
    verifies = drafter is not None or drafting is not None
    limits = StepLimits.of(config, context, config.max_num_batched_tokens if verifies else 0)
    kv = kv_manager(
        num_blocks,
        block_size,
        prefix_caching=prefix_caching,
        num_host_blocks=num_host_blocks,
        num_host_slots=num_host_slots,
        windows=windows,
        step_tokens=limits.max_tokens,
        states=StatePool(num_slots, 1) if num_slots else None,
    )
    runner = runner or FakeRunner(
        num_blocks,
        block_size,
        vocab_size,
        num_host_blocks=num_host_blocks,
        pooling=pooling,
        windows=windows,
        num_slots=num_slots,
        num_host_slots=num_host_slots,
    )
    runner.limits = runner.limits or limits
    if drafter is not None:
        drafting = every_draft_of(drafter)
    return engine(
        Scheduler(config, kv, make_policy(config), context, limits, drafting, offloading or ALWAYS, adapters),
        runner,
        ManualClock(),
        depth=depth,
        eos_ids=(EOS,),
        vocab_size=vocab_size,
        guides=guides,
        pooling=pooling,
        adapters=registry,
    )


def submitted(core: EngineCore) -> list[StepPlan]:
    """The plans that the fake runner of a core has been given, the oldest first."""
    runner = core.runner
    assert isinstance(runner, FakeRunner)
    return runner.submitted


def add(
    core: EngineCore,
    request_id: str,
    prompt: list[int],
    *,
    n: int = 1,
    salt: str = "",
    adapter: Adapter | None = None,
    guide: str | None = None,
    generation_prompt_len: int = 0,
    slo: Slo | None = None,
    **params: object,
) -> None:
    """`guide`: a grammar that the core's `GuideFactory` know."""
    sampling = SequenceParams(**{"max_tokens": 8, **params})
    spec = None if guide is None else GuideSpec(grammar=guide)
    meta = RequestMeta(cache_salt=salt, adapter=adapter, slo=slo)
    core.add(
        Add(
            request_id,
            Prompt(prompt, sampling, meta, spec, generation_prompt_len=generation_prompt_len),
            n,
        )
    )


class Collected:
    """Everything said of one sequence."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[int] = []
        self.prompt_logprobs: list[int] = []
        self.end: End | None = None
        self.cached_tokens = 0

    def take(self, output: SequenceOutput) -> None:
        assert self.end is None, "output after the end"
        self.tokens += output.token_ids
        self.logprobs += [entry.token_id for entry in output.logprobs or ()]
        self.prompt_logprobs += [entry.token_id for entry in output.prompt_logprobs or ()]
        if output.started is not None:
            self.cached_tokens = output.started.cached_tokens
        self.end = output.end

    @property
    def reason(self) -> FinishReason | None:
        return self.end.reason if self.end else None


def gather(outputs: list[SequenceOutput], into: dict[str, Collected]) -> None:
    for output in outputs:
        into.setdefault(output.request_id, Collected()).take(output)


def run_dry(core: EngineCore, into: dict[str, Collected] | None = None, max_steps: int = 2000) -> dict[str, Collected]:
    """Step until nothing is left; checks integrity after every step and that nothing leaked at the end."""
    collected: dict[str, Collected] = {} if into is None else into
    for _ in range(max_steps):
        if not core.busy:
            break
        gather(core.step(), collected)
        core.scheduler.check_integrity()
    assert not core.busy, "the engine makes no progress"
    assert_empty(core)
    return collected


def assert_empty(core: EngineCore) -> None:
    scheduler = core.scheduler
    scheduler.check_integrity()
    assert scheduler.num_live == 0
    assert not core.guided.live, "a guide without a sequence"
    guides = core.stats().guides
    assert guides is None or guides.waiting == 0, "a request waits for its grammar"
    assert scheduler.kv.num_free == scheduler.kv.num_blocks
    states = scheduler.kv.states
    assert states is None or states.pool.num_free == states.num_slots
