"""A network as ONNX: any number of images (batch, channels, size, size) -> logits (batch, classes), in float32.

What the images must look like (mean, std, size) and what the logits mean stands in the file's metadata.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...config import to_tree
from ...files import sync_folder
from ...models.exported import Exported
from .extras import need

NAME = "model.onnx"
WEIGHTS = NAME + ".data"  # beside it, where they are too large for one file
IMAGES, LOGITS, BATCH = "images", "logits", "batch"
LARGEST = 2_000_000_000  # bytes of weights; the format of the file ends at 2 GiB


def write_onnx(folder: Path, network: nn.Module, exported: Exported, largest: int = LARGEST) -> list[Path]:
    """Write `model.onnx`, whole or not at all; with more than `largest` bytes of weights, these in a file beside it."""
    need("onnx", "onnxscript", what="onnx")
    program = _exported_program(network, exported)
    for key, value in metadata_of(exported).items():
        program.model.metadata_props[key] = value
    apart = sum(tensor.nbytes for tensor in network.state_dict().values()) > largest
    part = Path(tempfile.mkdtemp(prefix=NAME, suffix=".part", dir=folder))
    try:
        program.save(part / NAME, external_data=apart)
        names = [WEIGHTS, NAME] if apart else [NAME]  # the model last: it is what readers open
        for name in names:
            _flush(part / name)
        (folder / WEIGHTS).unlink(missing_ok=True)
        for name in names:
            (part / name).replace(folder / name)
        sync_folder(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return [folder / name for name in names]


def metadata_of(exported: Exported) -> dict[str, str]:
    """What a reader has to know, as text; lists are JSON."""
    tree = {key: value for key, value in to_tree(exported).items() if value is not None}
    meaning = "pixels from 0 to 1, channel by channel minus mean, divided by std; RGB, or grey if there is one channel"
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in tree.items()} | {
        IMAGES: meaning
    }


def _exported_program(network: nn.Module, exported: Exported) -> Any:
    example = torch.zeros(2, exported.channels, exported.size, exported.size)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of torch about itself
        program = torch.onnx.export(
            network.eval(),
            (example,),
            dynamo=True,
            input_names=[IMAGES],
            output_names=[LOGITS],
            dynamic_shapes=({0: torch.export.Dim(BATCH)},),
            verbose=False,
        )
    assert program is not None
    # torch notes for every node where in which file it came from: longer than small networks, and nobody's business.
    program.model.graph.metadata_props.clear()
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()
    return program


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
