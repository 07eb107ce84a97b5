"""Engine process in which a step fails that begins a prompt with `POISON`. Run it with -m, like `engine.process`."""

import sys

from roseinfer.core.plan import StepPlan
from roseinfer.engine import process
from roseinfer.engine.process_transport import ProcessTransport

POISON = 7


class FragileTransport(ProcessTransport):
    module = "tests.helpers.fragile_engine"


def plant() -> None:
    from roseinfer.runner.model_runner import ModelRunner

    submit = ModelRunner.submit

    def fails(self: ModelRunner, plan: StepPlan) -> object:
        if any(admission.token_ids[0] == POISON for admission in plan.admitted):
            raise RuntimeError("planted poison")
        return submit(self, plan)

    ModelRunner.submit = fails  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    plant()
    sys.exit(process.main())
