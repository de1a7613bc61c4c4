"""A rank with a lifeline that ends in one of several ways.

    python -m tests.train.lifeline_worker WAY [VICTIM] [SILENCE]

WAY: `sleep`   ranks sleep, deaf to each other, and the victim kills itself without a word
     `machines` the same, but each rank believes to be on a machine of its own
     `end`     ranks end well, one of them late
"""

from __future__ import annotations

import os
import signal
import sys
import time

from sopdist.train import lifeline
from sopdist.train.settings import EngineSettings
from sopdist.train.world import find_place, open_world


def main() -> None:
    way = sys.argv[1]
    world = open_world(find_place(os.environ), EngineSettings(threads=1, timeout=60))
    if len(sys.argv) > 3:
        lifeline.SILENCE, lifeline.BEAT_EVERY = float(sys.argv[3]), 0.5
        machine = f"machine {world.rank}"
        lifeline._machine = lambda: machine
    line = lifeline.start(world)
    if way == "end":
        time.sleep(2.0 if world.rank == 0 else 0.0)
        line.stop()
        world.close()
        time.sleep(1.5 if world.rank == 0 else 0.0)  # others have gone by now
        return
    time.sleep(1.0)
    if world.rank == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)


if __name__ == "__main__":
    main()
