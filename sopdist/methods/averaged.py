"""A network whose weights are the moving average of another's, for methods that train with one.

`train.ema` averages the weights of any method, for evaluation only; see `train/weight_average.py`.
"""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def average_towards(average: nn.Module, current: nn.Module, decay: float) -> None:
    """Move the weights and buffers of `average` towards those of `current`: decay average + (1 - decay) current."""
    pairs = list(zip(average.state_dict().values(), current.state_dict().values(), strict=True))
    for kept, value in pairs:
        if kept.is_floating_point():
            kept.lerp_(value, 1 - decay)
        else:
            kept.copy_(value)
