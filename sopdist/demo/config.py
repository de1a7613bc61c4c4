"""The config of the demo: configs/demo.yaml of the repository, or the same where the package came without it."""

from __future__ import annotations

from pathlib import Path

from ..files import write_whole
from ..train.config import CONFIGS

# A test holds it against configs/demo.yaml.
_SAME = """\
data:
  root: shards/digits
  split: train
  recipe: digits
  labels: sym-0.4-seed0
model:
  name: mlp
objective:
  name: sop
optim:
  lr: 0.02
  schedule: cosine
train:
  epochs: 60
  batch: 64
engine:
  kind: deepspeed
  zero: 0
  threads: 1
evaluate:
  splits:
    test: test
log:
  every: 10
"""


def write_config(folder: Path, configs: Path = CONFIGS) -> Path:
    """Where the config is; it is written into the demo's folder if the repository is not there."""
    ours = configs / "demo.yaml"
    if ours.is_file():
        return ours
    path = folder / "demo.yaml"
    write_whole(path, _SAME.encode())
    return path
