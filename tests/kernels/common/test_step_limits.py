"""The kernel that expands a step's rows writes within the runner's buffers, for any plan."""

import numpy as np
import pytest
import torch

from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.plan import StepLimits, StepPlan
from roseinfer.core.request import Prompt, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Slo
from roseinfer.engine.messages import Add
from roseinfer.runner import cuda_inputs
from roseinfer.runner.cuda_inputs import CudaInputs
from roseinfer.runner.forward import Columns
from roseinfer.runner.seats import SeatTable
from tests.helpers.engines import make_core
from tests.helpers.fake_runner import FakeRunner

BLOCK, BLOCKS, CONTEXT, SEATS, BUDGET = 4, 400, 60, 6, 8
POISON, BEHIND = -(2**40), 4096  # more than a step may contain


class HostStaging:
    """`Staging` without a GPU."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.device = torch.zeros(size, dtype=torch.int32)
        self._host = np.zeros(size, np.int32)

    def fill(self) -> np.ndarray:
        return self._host

    def send(self, count: int) -> torch.Tensor:
        assert count <= len(self.device)
        self.device[:count] = torch.from_numpy(self._host[:count])
        return self.device[:count]


class InputsRunner(FakeRunner):
    """Runner that sends each plan's rows through the real input kernel, with guard elements after its buffers."""

    def __init__(self, limits: StepLimits) -> None:
        super().__init__(BLOCKS, BLOCK)
        self._seats = SeatTable(SEATS, CONTEXT, BLOCK, 50, torch.device("cpu"), spare_blocks=(BLOCKS,))
        self._inputs = CudaInputs(self._seats, limits.max_rows, limits.max_tokens)
        self._behind: dict[str, torch.Tensor] = {}
        for name in ("input_ids", "positions", "slots", "query_start", "context_len"):
            buffer = getattr(self._inputs, name)
            size = buffer.shape[-1]
            wide = torch.full((size + BEHIND,), POISON if buffer.dtype == torch.int64 else -99).to(buffer.dtype)
            setattr(self._inputs, name, wide[:size].expand_as(buffer))
            self._behind[name] = wide[size:]

    def submit(self, plan: StepPlan) -> int:
        self._seats.release(plan.released)
        self._seats.admit(plan.admitted)
        handle = super().submit(plan)
        batch = self._inputs.prepare(Columns.of(plan.rows)).batch
        assert len(batch.input_ids) == plan.num_tokens == int(batch.query_start[-1]), "the model sees the whole step"
        for name, tensor in self._behind.items():
            assert (tensor == tensor[-1]).all(), f"{int((tensor != tensor[-1]).sum())} elements behind {name}"
        return handle


@pytest.fixture
def host_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_inputs, "Staging", HostStaging)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("policy", ["fifo", "pack", "slack"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels write to the host's memory under the interpreter only")
def test_no_step_writes_behind_the_buffers(host_staging: None, policy: str, chunked: bool) -> None:
    options = {"max_num_seqs": SEATS, "max_num_batched_tokens": BUDGET, "enable_chunked_prefill": chunked}
    limits = StepLimits.of(SchedulerConfig(**options), CONTEXT)
    runner = InputsRunner(limits)
    core = make_core(
        num_blocks=BLOCKS, block_size=BLOCK, runner=runner, max_model_len=CONTEXT, scheduling_policy=policy, **options
    )

    def add(name: str, prompt: int, output: int) -> None:
        params = SequenceParams(max_tokens=output, ignore_eos=True)
        meta = RequestMeta(slo=Slo(tpot_s=5.0) if policy == "slack" else None)
        core.add(Add(name, Prompt([i % 50 for i in range(prompt)], params, meta)))

    for i in range(SEATS - 1):
        add(f"short-{i}", 1 + i % 2, 12)
    for _ in range(4):
        core.step()
    decoding = len(core.scheduler.running)
    add("long", CONTEXT - 2, 2)
    for _ in range(100):
        core.step()
    assert not core.busy, "a long prompt starves"
    most = max(plan.num_tokens for plan in runner.submitted)
    if chunked or policy != "slack":
        assert most == (BUDGET if chunked else CONTEXT - 2 + decoding) and decoding >= 4
    else:
        assert CONTEXT - 2 <= most <= limits.max_tokens, "slack starts it when it sees fit"
