"""Work of `roseinfer calibrate`: samples from an engine or a recorded run, and the fit to them."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from roseinfer.calibration.config import CPU_GRID, GPU_GRID, CalibrateConfig
from roseinfer.calibration.recorded import recorded_samples
from roseinfer.calibration.sweep import CalibrationSweep, EngineLimits
from roseinfer.core.config.engine import EngineConfig
from roseinfer.engine.api import EngineInfo
from roseinfer.engine.local import LocalEngine
from roseinfer.sched.cost.file import cost_as_json
from roseinfer.sched.cost.offline_fit import CostSample, Fit, fit_cost

FACTS = ("model", "device", "dtype", "max_model_len", "num_blocks", "num_host_blocks", "block_size", "max_num_seqs")
# Field of CostParams -> its unit as shown, how many of them a second has, what it is paid for.
CONSTANTS = {
    "step_s": ("ms", 1e3, "any step"),
    "token_s": ("us", 1e6, "per prompt token"),
    "pair_s": ("ns", 1e9, "per token that a prompt token attends to"),
    "row_s": ("us", 1e6, "per request that decodes"),
    "context_s": ("ns", 1e9, "per token that such a request attends to"),
    "chunk_context_s": ("ns", 1e9, "per token that comes before a chunk of a prompt"),
}
# Those that are measured apart, of an engine with K and V in host memory.
COPIES = {
    "load_s": ("us", 1e6, "per KV block that comes from host memory"),
    "store_s": ("us", 1e6, "per KV block that goes there"),
}


@dataclass(frozen=True, slots=True)
class Calibration:
    """The fit, and facts of the engine that was measured (none for a recorded run). `copies`: what its copies to and
    from host memory take, as `COPIES` names it; empty without these.
    """

    fit: Fit
    machine: dict[str, Any]
    copies: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        figures = {name: value for name, value in asdict(self.fit).items() if name != "params"}
        cost = cost_as_json(replace(self.fit.params, **self.copies))
        return {**cost, "fit": figures, "machine": self.machine}

    def as_text(self) -> str:
        fit = self.fit
        lines = [f"{fit.samples} steps, {fit.outliers} of them outliers"]
        for name, (unit, factor, meaning) in CONSTANTS.items():
            lines.append(f"  {name.ljust(15)}  {factor * getattr(fit.params, name):10.4g} {unit}  {meaning}")
        if fit.params.experts is not None:
            meaning = f"per expert that a layer reads, of {fit.params.experts.count}"
            lines.append(f"  {'expert_s'.ljust(15)}  {1e6 * fit.params.expert_s:10.4g} us  {meaning}")
        for name, seconds in self.copies.items():
            unit, factor, meaning = COPIES[name]
            lines.append(f"  {name.ljust(15)}  {factor * seconds:10.4g} {unit}  {meaning}")
        worst = f"worst error {fit.worst:+.1%}, {fit.worst_of_all:+.1%} with the outliers"
        return "\n".join([*lines, f"  R2 {fit.r2:.4f}, MAPE {fit.mape:.1%}, {worst}"])


def calibrate(config: CalibrateConfig, engine: EngineConfig) -> Calibration:
    """Calibrate. Raise `ConfigError`, `CalibrationError`, and the errors of `LocalEngine`."""
    if config.recorded:
        return Calibration(fit_cost(*recorded_samples(config.recorded)), {})
    samples, info = measure(config, engine)
    facts = info.facts
    copies = {name: getattr(facts, name) for name in COPIES} if facts.num_host_blocks else {}
    machine = {name: getattr(info if hasattr(info, name) else facts, name) for name in FACTS}
    return Calibration(fit_cost(samples, facts.experts, facts.reads), machine, copies)


def measure(config: CalibrateConfig, engine: EngineConfig) -> tuple[list[CostSample], EngineInfo]:
    """Run the sweep with the policy `fifo`, which starts every request that fits."""
    scheduler = replace(engine.scheduler, scheduling_policy="fifo")
    with LocalEngine(replace(engine, scheduler=scheduler)) as local:
        info, facts = local.info, local.info.facts
        cache_tokens = facts.num_blocks * facts.block_size
        bounds = EngineLimits(facts.max_model_len, cache_tokens, info.max_num_seqs, facts.vocab_size)
        grid = config.grid(CPU_GRID if facts.device == "cpu" else GPU_GRID)
        samples = CalibrationSweep(local.core, bounds, grid, engine.model.seed, facts.reads).run()
    return samples, info
