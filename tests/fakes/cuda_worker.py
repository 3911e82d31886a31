"""A process of kvcheck over the stand-in for torch.cuda, in which one schedule gives an operation an id out of range.

    CUDA_LOST_IN   which plans lose the device: words that are all in their lines
    CUDA_DIES_IN   which plans end the process, likewise
    CUDA_DIARY     a file that gets "PID LINE" for each schedule on the device

The names begin as those that a child inherits.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from fakes.cuda import installed

from kvcheck.commands import worker
from kvcheck.core.run.outcome import Outcome
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.runner import ScheduleRunner

CHUNK = 20
"""The chunk of such a schedule that the device does not survive."""


def is_meant(name: str, plan: Plan) -> bool:
    """True if the plan's line has all words of a variable."""
    words = os.environ.get(name, "").split()
    return bool(words) and all(word in plan.line() for word in words)


def main() -> int:
    """The worker of the commands, with its device replaced."""
    with installed(1) as machine:
        run = ScheduleRunner.run

        def noted(self: ScheduleRunner, plan: Plan, **given: Any) -> Outcome:
            if plan.on_device:
                with open(os.environ["CUDA_DIARY"], "a") as diary:
                    diary.write(f"{os.getpid()} {plan.line()}\n")
                if is_meant("CUDA_DIES_IN", plan):
                    os._exit(3)
                machine.chunks_left = CHUNK if is_meant("CUDA_LOST_IN", plan) else 0
            return run(self, plan, **given)

        ScheduleRunner.run = noted  # type: ignore[method-assign]
        return worker.main()


if __name__ == "__main__":
    sys.exit(main())
