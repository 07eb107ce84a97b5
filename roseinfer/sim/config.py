"""Options of `roseinfer simulate`."""

import re
from dataclasses import dataclass, replace
from math import isfinite

from roseinfer.core.config.engine import check_block_size
from roseinfer.core.config.option import check_positive, check_within, option, positive_numbers
from roseinfer.core.config.speculation import MAX_DRAFTS
from roseinfer.core.errors import ConfigError
from roseinfer.core.runner import ExpertChoice, StatePool, WindowPool
from roseinfer.priced.machine import Machine
from roseinfer.sched.cost.file import read_cost
from roseinfer.sched.cost.params import CostParams
from roseinfer.sim.drafts import DEFAULT_DRAFTS_COUNT

SETUPS = ("scorpio-8b", "moe-30b")
WORKLOADS = ("poisson", "gamma", "bursts", "trace")
# Options of `CostConfig` that a cost file or a setup determines.
CONSTANTS = (
    *("step_ms", "token_us", "row_us", "context_ns", "pair_ns", "chunk_context_ns"),
    *("expert_us", "num_experts", "num_experts_per_tok"),
)
MAX_COST_VALUE = 1e12  # of these and similar options, in the unit of each: larger ones overflow
MIN_CV, MAX_CV = 1e-3, 1e3
MIN_SLOWDOWN_RATIO, MAX_SLOWDOWN_RATIO = 1e-6, 1e6
_WINDOW = re.compile(r"(\d+):(\d+)(?::(0?\.\d+|0|1))?")
LENGTHS = ("predictor", "oracle", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """Options of random requests. Without a setup, lengths are uniform and requests have no objectives."""

    setup: str | None = option(None, "machine, lengths and objectives of an experiment", choices=SETUPS)
    num_requests: int = option(256, "requests of a run; at most these of a trace", aliases=("requests",))
    workload: str = option(
        "poisson",
        f"arrival process: {', '.join(WORKLOADS)}; or a file that describes the workload (docs/how-to/workloads.md)",
        metavar="NAME|FILE.toml",
    )
    request_rate: float = option(0.0, "arrivals per second; 0 = all at once")
    cv: float = option(4.0, "gamma: coefficient of variation of the gaps between arrivals")
    trace: str | None = option(None, "Azure CSV, Mooncake JSONL, or a recorded run", metavar="FILE")
    trace_seconds: float | None = option(None, "seconds of the trace to play; default: all")
    trace_speed: float = option(1.0, "speed of the trace, as a factor")
    trace_lengths: bool = option(False, "use the trace's lengths; off: only its times, with the setup's lengths")
    input_len_min: int = option(16, "shortest prompt in tokens")
    input_len: int = option(512, "longest prompt in tokens")
    output_len_min: int = option(16, "shortest output in tokens")
    output_len: int = option(128, "longest output in tokens")
    slo_classes: str | None = option(
        None, "classes of objectives, as of `serve`; default: the setup's", metavar="FILE.toml"
    )
    class_shares: str | None = option(None, "relative number of requests of each class: a,b,...", metavar="SHARES")
    tenant_shares: str | None = option(None, "relative number of requests of each tenant: a,b,...", metavar="SHARES")
    predictor_rmse: float | None = option(
        None, "error of the predicted output lengths in tokens; default: the setup's, else no predictions"
    )
    replay: str | None = option(
        None,
        "run the scheduler of a recorded run (serve --record) again and compare, instead of a simulation",
        metavar="FILE",
    )
    speculation_acceptance: str | None = option(
        None,
        "verify drafts of which this share is right: a,b,... by position, or one share for each of four; default: none",
        metavar="SHARES",
    )
    seed: int = option(0, "seeds arrivals, lengths and prompts")
    json: str | None = option(None, "write the result to this file", metavar="FILE", written=True)

    def __post_init__(self) -> None:
        check_positive(self, "num_requests", "input_len_min", "output_len_min", "trace_seconds", "trace_speed")
        check_positive(self, "predictor_rmse")
        check_within(self, MIN_CV, MAX_CV, "cv")
        if not (isfinite(self.request_rate) and self.request_rate >= 0):
            raise ConfigError(f"request_rate must be 0 or positive, and finite, got {self.request_rate}")
        if self.input_len < self.input_len_min or self.output_len < self.output_len_min:
            raise ConfigError("input_len and output_len must not be below their minima")
        if self.file is None and self.workload not in WORKLOADS:
            names = ", ".join(WORKLOADS)
            raise ConfigError(f"workload must be one of {names}, or a file that ends in .toml, got {self.workload!r}")
        if (self.workload == "trace") != (self.trace is not None):
            raise ConfigError("--workload trace requires --trace, and --trace requires --workload trace")
        _ = self.class_share_list, self.tenant_share_list, self.acceptance

    @property
    def file(self) -> str | None:
        """File that describes the workload, if there is one."""
        return self.workload if self.workload.endswith(".toml") else None

    @property
    def class_share_list(self) -> tuple[float, ...]:
        return positive_numbers("class_shares", self.class_shares, float)

    @property
    def tenant_share_list(self) -> tuple[float, ...]:
        return positive_numbers("tenant_shares", self.tenant_shares, float)

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Shares of right drafts, by position; empty without drafts."""
        shares = positive_numbers("speculation_acceptance", self.speculation_acceptance, float)
        if any(share > 1 for share in shares) or len(shares) > MAX_DRAFTS:
            raise ConfigError(
                f"speculation_acceptance must be at most {MAX_DRAFTS} shares up to 1, got {self.speculation_acceptance}"
            )
        return shares * DEFAULT_DRAFTS_COUNT if len(shares) == 1 else shares


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig:
    """Options of a comparison of policies at several loads, each with several seeds."""

    policies: str | None = option(
        None,
        "compare these policies; with the suffix -oracle or -none a policy knows true lengths, or none",
        metavar="NAMES",
    )
    rates: str | None = option(None, "arrivals per second to compare at: a,b,...", metavar="RATES")
    seeds: int = option(1, "runs of each policy at each rate")
    lengths: str = option("predictor", "output lengths that policies know", choices=LENGTHS)
    slowdown: float = option(1.0, "factor by which the machine is slower than policies assume")
    false_rejects: bool = option(False, "replay each run with true lengths, and count needless rejections")
    capacity: bool = option(False, "find the highest rate at which the target is met")
    target: float = option(0.99, "capacity, autoscale: share of the requests that must meet their objectives")
    jobs: int | None = option(None, "runs at once; default: one per core")
    plot: str | None = option(None, "draw goodput and adherence against load", metavar="FILE", written=True)

    def __post_init__(self) -> None:
        check_positive(self, "seeds", "jobs")
        check_within(self, MIN_SLOWDOWN_RATIO, MAX_SLOWDOWN_RATIO, "slowdown")
        if not 0 < self.target < 1:
            raise ConfigError(f"target must be between 0 and 1, got {self.target}")

    @property
    def rate_list(self) -> tuple[float, ...]:
        return positive_numbers("rates", self.rates, float)

    @property
    def policy_list(self) -> list[str]:
        return [name.strip() for name in (self.policies or "").split(",") if name.strip()]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostConfig:
    """Options of the machine: costs of a step, and its memory."""

    cost: str | None = option(
        None, "read the next nine from a file of `roseinfer calibrate`; overrides a setup's", metavar="FILE"
    )
    step_ms: float = option(5.0, "constant milliseconds of a step: reading the weights, launching")
    token_us: float = option(20.0, "microseconds per prompt token computed")
    row_us: float | None = option(None, "microseconds per decoding request; default: --token-us")
    context_ns: float = option(20.0, "nanoseconds per token of K/V that a decoding request attends to")
    pair_ns: float | None = option(None, "nanoseconds per token that a prompt token attends to; default: --context-ns")
    chunk_context_ns: float = option(0.0, "nanoseconds per token before each chunk of a prompt")
    expert_us: float = option(0.0, "microseconds per expert that a layer reads in a step, for all layers")
    num_experts: int | None = option(None, "experts of a layer; default: none")
    num_experts_per_tok: int | None = option(None, "experts that compute each token")
    load_us: float | None = option(
        None, "microseconds per KV block copied from host memory; default: the cost file's, else 50"
    )
    store_us: float | None = option(
        None, "microseconds per KV block copied to host memory; default: the cost file's, else 50"
    )
    exposed_ms: float = option(
        0.0, "milliseconds of the host for a step, unless another step runs meanwhile (`--overlap`, without drafts)"
    )
    exposed_row_us: float = option(0.0, "the same for each request of the step, in microseconds")
    noise: float = option(0.0, "a step takes 1 + |N(0, noise)| times its cost")
    max_model_len: int = option(4096, "context in tokens")
    num_kv_blocks: int = option(8192, "KV blocks")
    num_host_blocks: int = option(0, "KV blocks in host memory beyond those; 0 = none")
    kv_windows: str | None = option(
        None,
        "further KV groups, as tokens of the window:blocks, for layers that see a window only; a third number is their "
        "share of the K/V, of which steps read the window only",
        metavar="WINDOW:BLOCKS[:SHARE],...",
    )
    state_slots: int | None = option(
        None, "slots for the recurrent states of running requests and for snapshots; default: the model has none"
    )
    state_us: float = option(
        0.0,
        "microseconds to read and write one recurrent state, in addition to --row-us; the default of "
        "--chunk-context-ns is then --context-ns",
    )
    block_size: int = option(16, "tokens of a KV block, a power of two up to 256")
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of prompts seen before")

    def __post_init__(self) -> None:
        others = ("load_us", "store_us", "noise", "state_us", "exposed_ms", "exposed_row_us")
        check_within(self, 0, MAX_COST_VALUE, *CONSTANTS, *others)
        if self.step_ms == self.token_us == 0:
            raise ConfigError("step_ms and token_us must not both be 0, since time would not advance")
        check_positive(self, "max_model_len", "num_kv_blocks", "block_size", "num_experts", "num_experts_per_tok")
        check_positive(self, "state_slots")
        self._check_experts()
        check_block_size(self.block_size)
        if self.num_host_blocks < 0:
            raise ConfigError(f"num_host_blocks must not be negative, got {self.num_host_blocks}")
        if self.num_host_blocks and not self.enable_prefix_caching:
            raise ConfigError("num_host_blocks needs enable_prefix_caching, which finds the blocks")
        if self.num_host_blocks and self.kv_windows:
            raise ConfigError(
                "num_host_blocks and kv_windows exclude each other: host memory holds blocks of all layers"
            )
        self._windows()
        if self.state_us and self.state_slots is None:
            raise ConfigError("state_us needs state_slots, the number of slots for states")

    def _windows(self) -> list[tuple[WindowPool, float]]:
        """Return the pool of each window group, and its share of the K/V."""
        found = []
        for part in filter(None, (self.kv_windows or "").split(",")):
            fields = _WINDOW.fullmatch(part)
            if fields is None or not (int(fields[1]) and int(fields[2])):
                raise ConfigError(
                    f"kv_windows must be pairs of positive integers like 1024:4000, or with a share up to 1 like "
                    f"1024:4000:0.8, got {part!r}"
                )
            found.append((WindowPool(int(fields[1]), int(fields[2])), float(fields[3] or 0)))
        if sum([share for _, share in found]) > 1:
            raise ConfigError(f"kv_windows: shares must add up to 1 at most, got {self.kv_windows!r}")
        return found

    def _check_experts(self) -> None:
        count, top_k = self.num_experts, self.num_experts_per_tok
        if count is None and top_k is None:
            if self.expert_us:
                raise ConfigError("expert_us needs num_experts and num_experts_per_tok")
        elif type(count) is not int or type(top_k) is not int or top_k > count:
            raise ConfigError(
                "num_experts and num_experts_per_tok must be integers, the second at most the first, got "
                f"{count} and {top_k}"
            )

    @property
    def params(self) -> CostParams:
        """Constants of the cost model. Raise `ConfigError` for an invalid cost file."""
        params = self._constants if self.cost is None else read_cost(self.cost)
        load_s = params.load_s if self.load_us is None else self.load_us * 1e-6
        store_s = params.store_s if self.store_us is None else self.store_us * 1e-6
        return self._with_reads(replace(params, load_s=load_s, store_s=store_s))

    def _with_reads(self, params: CostParams) -> CostParams:
        """Return the costs with the shares of windows and the time of states, as far as options give them."""
        reads, shares = params.reads, tuple([(pool.window, share) for pool, share in self._windows() if share])
        if shares:
            reads = replace(reads, windows=shares)
        if not self.state_us:
            return replace(params, reads=reads)
        state_s, before_s = self.state_us * 1e-6, params.chunk_context_s or params.context_s
        if not before_s:
            raise ConfigError("state_us needs context_ns or chunk_context_ns: a state counts as tokens of context")
        reads = replace(reads, state_tokens=state_s / before_s)
        return replace(params, reads=reads, row_s=params.row_s + state_s, chunk_context_s=before_s)

    @property
    def _constants(self) -> CostParams:
        row_us = self.token_us if self.row_us is None else self.row_us
        pair_ns = self.context_ns if self.pair_ns is None else self.pair_ns
        experts = None
        if self.num_experts is not None and self.num_experts_per_tok is not None:
            experts = ExpertChoice(self.num_experts, self.num_experts_per_tok)
        return CostParams(
            step_s=self.step_ms * 1e-3,
            token_s=self.token_us * 1e-6,
            pair_s=pair_ns * 1e-9,
            row_s=row_us * 1e-6,
            context_s=self.context_ns * 1e-9,
            chunk_context_s=self.chunk_context_ns * 1e-9,
            expert_s=self.expert_us * 1e-6,
            experts=experts,
        )

    @property
    def machine(self) -> Machine:
        return Machine(
            cost=self.params,
            noise=self.noise,
            max_model_len=self.max_model_len,
            num_blocks=self.num_kv_blocks,
            num_host_blocks=self.num_host_blocks,
            windows=tuple([pool for pool, _ in self._windows()]),
            states=None if self.state_slots is None else StatePool(self.state_slots, 0),
            block_size=self.block_size,
            prefix_caching=self.enable_prefix_caching,
            exposed_s=self.exposed_ms * 1e-3,
            exposed_row_s=self.exposed_row_us * 1e-6,
        )
