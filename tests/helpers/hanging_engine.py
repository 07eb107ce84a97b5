"""Engine process on the priced device whose first step never ends. Run it with -m, like `engine.process`."""

import sys
import threading

from roseinfer.core.plan import StepPlan
from roseinfer.engine import process
from roseinfer.engine.process_transport import ProcessTransport
from roseinfer.priced.machine import PricedRunner


class HangingTransport(ProcessTransport):
    module = "tests.helpers.hanging_engine"


def wait_for_ever(self: PricedRunner, plan: StepPlan) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


if __name__ == "__main__":
    PricedRunner.submit = wait_for_ever  # type: ignore[method-assign, assignment]
    sys.exit(process.main())
