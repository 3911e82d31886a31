"""A process of kvcheck over the stand-in for torch.cuda, in which one schedule gives an operation an id out of range.

    CUDA_LOST_IN   which plans lose the device: words that are all in their lines
    CUDA_DIARY     a file that gets "PID LINE" for each schedule on the device

Both names begin as those that a child inherits.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from fakes.cuda import installed

from kvcheck.commands import worker
from kvcheck.core.stress.runner import Outcome, ScheduleRunner
from kvcheck.core.stress.schedule import Plan

CHUNK = 20
"""The chunk of such a schedule that the device does not survive."""


def main() -> int:
    """The worker of kvcheck stress, with its device replaced."""
    with installed(1) as machine:
        run = ScheduleRunner.run

        def noted(self: ScheduleRunner, plan: Plan, **given: Any) -> Outcome:
            if plan.on_device:
                with open(os.environ["CUDA_DIARY"], "a") as diary:
                    diary.write(f"{os.getpid()} {plan.line()}\n")
                words = os.environ.get("CUDA_LOST_IN", "").split()
                machine.chunks_left = CHUNK if words and all(word in plan.line() for word in words) else 0
            return run(self, plan, **given)

        ScheduleRunner.run = noted  # type: ignore[method-assign]
        return worker.main()


if __name__ == "__main__":
    sys.exit(main())
