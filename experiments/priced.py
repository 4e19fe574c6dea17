"""
train.py on a machine that one does not have: what a step costs is given, not measured. Decisions are those of that machine.

    STEP_COST=0.27,0.0006 python experiments/priced.py [arguments of train.py]     # seconds of a step, and of each sequence
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import train  # noqa: E402
from rightbatch.decision import Cost  # noqa: E402
from trainer.step import TrainingStep  # noqa: E402


def main(argv=None):
    fixed, each = map(float, os.environ["STEP_COST"].split(","))
    given = Cost((fixed,) * 3, (each,) * 3, "given")
    TrainingStep.cost = lambda self: self.timer.estimate() and given  # known as soon as it would be measured
    return train.main(argv)


if __name__ == "__main__":
    sys.exit(main())
