"""A rank with a watchdog that ends in one of several ways.

    python -m tests.support.watchdog_worker WAY [VICTIM] [TIMEOUT]

WAY: `sleep`     ranks sleep without communicating, and the victim kills itself with SIGKILL
     `machines`  the same, but each rank pretends to be on a machine of its own
     `end`       ranks shut down normally, one of them late
TIMEOUT: seconds without a heartbeat after which a machine is lost
"""

from __future__ import annotations

import os
import signal
import sys
import time

from sopdist.train.distributed import watchdog
from sopdist.train.distributed.world import find_launch_env, open_world
from sopdist.train.settings import EngineSettings


def main() -> None:
    way = sys.argv[1]
    world = open_world(find_launch_env(os.environ), EngineSettings(threads=1, timeout=60))
    if len(sys.argv) > 3:
        watchdog.HEARTBEAT_TIMEOUT, watchdog.HEARTBEAT_INTERVAL = float(sys.argv[3]), 0.5
        machine = f"machine {world.rank}"
        watchdog._machine = lambda: machine
    watching = watchdog.start(world)
    if way == "end":
        time.sleep(2.0 if world.rank == 0 else 0.0)
        watching.stop()
        world.close()
        time.sleep(1.5 if world.rank == 0 else 0.0)  # the others have exited by now
        return
    time.sleep(1.0)
    if world.rank == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)


if __name__ == "__main__":
    main()
