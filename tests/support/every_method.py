"""Every method, with the settings that make it do something on tiny data, and a program that trains all of them.

    python -m tests.support.every_method CONFIG FOLDER NAME [--resume] [key=value ...]      under any launcher

The processes start only once: all methods are trained one after the other in the same process group, each as the run
FOLDER/METHOD-NAME. Methods that the config refuses are left out, and their messages are written to FOLDER/refused.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from sopdist.errors import ConfigError
from sopdist.methods import METHODS
from sopdist.train.config import Config, load
from sopdist.train.distributed.launch_env import find_launch_env
from sopdist.train.distributed.run_ranks import run_ranks
from sopdist.train.distributed.stop_requests import listen_for_requests
from sopdist.train.distributed.world import World
from sopdist.train.run import _train
from tests.support.pair_method import PairMethod

CONFIG = """
data: {root: shards, split: train, recipe: digits, labels: wrong, backend: cpu, threads: 1}
model: {name: small_conv}
optim: {lr: 0.02, schedule: constant}
train: {epochs: 5, batch: 9}
engine: {threads: 1}
evaluate: {splits: {val: val}}
checkpoint: {steps: 4, keep: 100}
log: {every: 1, wandb: 'off'}
"""
SAMPLES = 61
REFUSED = "refused.json"

EVERY_METHOD = {name: [f"method={{name: {name}}}"] for name in METHODS} | {
    "sop-plus": ["method={name: sop, consistency: 0.9, balance: 0.1, visits: 1.5, layout: slots}"],
    "sop-from-the-second-epoch": ["method={name: sop, onset: 1, visits: 1.5}"],
    "sop-with-automatic-onset": ["method={name: sop, onset: auto, layout: slots}"],
    "sop-plus-with-mixup": ["method={name: sop, onset: 1, consistency: 0.5, mixup: 0.7}"],
    "truncated-gce": ["method={name: gce, truncate: 0.1, prune_from: 1, prune_every: 1}"],
    "compact-elr": ["method={name: elr, layout: float16}"],
    "dividemix-on-labelled-images": ["method={name: dividemix, unlabelled_weight: 0, penalty: true, history: 2}"],
    "cores2-with-an-early-sieve": ["method={name: cores2, warmup: 0, ramp_end: 1, sieve_from: 1}"],
    "early-cores2-star": ["method={name: cores2_star, warmup: 0, ramp_end: 1, sieve_from: 0, sieve_epochs: 1}"],
    "coteaching-plus-at-once": ["method={name: coteaching_plus, warmup: 0, forget: 0.4, double_softmax: true}"],
    "averaged-weights": ["method={name: ce}", "train.ema=0.9"],
    "pair": ["method={name: pair, agreement: 0.25}"],
}


def main(arguments: list[str]) -> int:
    """Train every method; the exit code is that of the first failure."""
    METHODS["pair"] = PairMethod
    config, folder, name, *rest = [word for word in arguments if not word.startswith("--")]
    resume = "auto" if "--resume" in arguments else "none"
    configs: dict[str, Config] = {}
    refused: dict[str, str] = {}
    for method, overrides in EVERY_METHOD.items():
        try:
            configs[method] = load(config, [f"run.folder={folder}", f"run.name={method}-{name}", *overrides, *rest])
        except ConfigError as error:
            refused[method] = str(error)
    env = find_launch_env(os.environ)
    if env.rank == 0:
        (Path(folder) / REFUSED).write_text(json.dumps(refused))

    def work(world: World) -> int:
        for each in configs.values():
            code = _train(each, world, requests=requests, resume=resume, allow_change=())
            if code:
                return code
        return 0

    with listen_for_requests(env.launcher) as requests:
        return run_ranks(env, next(iter(configs.values())).engine, work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
