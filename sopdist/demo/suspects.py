"""The most suspicious labels of a run, drawn in characters: the noise table of its checkpoint, images of its shards."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ..checkpoint import complete_checkpoints, open_checkpoint
from ..config import load_config
from ..data.labels import CLEAN
from ..data.split import Split, open_split
from ..noise import SOP
from ..train.config import Config
from ..train.run_folder import CONFIG

SHADES = " .:-=+*#%@"
_WIDTH = 16


def draw_suspects(run: Path, count: int) -> str:
    """Pictures side by side; below them the sample's number and its label as given, as proposed, and the true one."""
    config = load_config(Config, run / CONFIG)
    with open_split(config.data.location) as split:
        given, true = (split.labels(name).labels.astype(np.int64) for name in (config.data.labels, CLEAN))
        sop = read_table(run, split, config.run.seed)
        suspects = sop.suspects(count).tolist()
        proposed = sop.proposed_labels(torch.from_numpy(given)).numpy()
        pictures = [draw(pixels_of(split.image(index))) for index in suspects]
    lines = ["   ".join(line) for line in zip(*pictures, strict=True)]
    for what, labels in (("given", given), ("proposed", proposed), ("true", true)):
        lines.append("   ".join(f"{f'{what} {labels[index]}':{_WIDTH}}" for index in suspects))
    lines.append("   ".join(f"{f'sample {index}':{_WIDTH}}" for index in suspects))
    return f"\nThe {len(suspects)} most suspicious labels:\n\n" + "\n".join(line.rstrip() for line in lines)


def read_table(run: Path, split: Split, seed: int) -> SOP:
    """The noise table of a run's newest checkpoint, of all ranks together."""
    sop = SOP(num_samples=len(split), num_classes=len(split.manifest.classes), seed=seed)
    sop.table.load_state_dict(open_checkpoint(complete_checkpoints(run)[-1]).noise())
    return sop


def pixels_of(image: bytes) -> NDArray[np.uint8]:
    """A grey image, (height, width)."""
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(image)).convert("L"))


def draw(pixels: NDArray[np.uint8]) -> list[str]:
    """An image of 8 x 8 as 8 lines of 16 characters: a character is twice as high as it is wide."""
    shades = np.rint(pixels.astype(float) * ((len(SHADES) - 1) / 255)).astype(int)
    return ["".join(SHADES[shade] * 2 for shade in line) for line in shades]
