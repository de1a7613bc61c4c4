"""Export the noise table as Parquet, one row per sample, to find wrong labels with pandas, DuckDB or Spark.

Uses the readout of the table (`noise/readout.py`); does not know about checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import DataError
from ..files import atomic_file
from ..noise.evidence import weigh
from ..noise.readout import Readout
from ..noise.rows import NoiseTable
from ..noise.saved_table import FREE, LAYOUTS
from ..noise.windows import Windows
from . import require_packages

NAME = "noise.parquet"
TOP = 8  # default number of entries of v per row
COLUMNS = {
    "index": "sample index, as everywhere in sopdist",
    "label": "class index used in training; null if there was none",
    "score": "how suspicious the label is: higher is worse; null if the sample was never visited",
    "mean_loss": "running mean of the network's loss on the label",
    "mean_margin": "running mean of p(label) minus the largest other p; -1 to 1, low is suspicious",
    "mean_fit": "running mean of p(label); 0 to 1, low is suspicious",
    "visits": "number of times the sample was trained on",
    "flagged": "the label is probably wrong: absorbed by the noise term in favour of a class that the visits favoured",
    "proposed": "proposed class index: that class if flagged (unless provisional), else the label; null if unknown",
    "u": "noise parameter at the label; u^2 is added to the prediction there",
    "v_class": "classes with the largest v^2 among those ever updated, largest first",
    "v_square": "v^2 of these classes, which is subtracted from the prediction there",
}
_LABEL_COLUMNS = ("label", "proposed")
_GROUP_ROWS = 1 << 17  # rows per row group


class SavedTable(Readout):
    """A full saved table, on one rank."""

    exchange = None

    def __init__(self, state: Mapping[str, Tensor], onset: Tensor | None = None) -> None:
        """`onset`: what `SOP.onset_state` returned, if it was saved."""
        self.table = _load_table(state)
        self._windows = Windows(self.num_samples, "auto", "cpu")
        if onset is not None:
            self._windows.load(onset, first_rank=True)


def write_noise(
    path: Path,
    state: Mapping[str, Tensor],
    labels: NDArray[Any] | None = None,
    *,
    top: int = TOP,
    about: Mapping[str, Any] | None = None,
    onset: Tensor | None = None,
) -> None:
    """Write the saved table of all samples atomically. A table that still votes is written as it would start to act.

    labels: (N,) class indices, negative for no label; without them the columns `label` and `proposed` are omitted.
    about: stored in the file's metadata under the key `sopdist`, as JSON.
    onset: what `SOP.onset_state` returned, if it was saved.
    """
    require_packages("pyarrow", "pyarrow.parquet", what="noise")
    import pyarrow as pa
    from pyarrow import parquet

    saved = SavedTable(state, onset)
    columns = columns_of(saved, labels)
    classes, squares = top_entries(state, top)
    names = [name for name in COLUMNS if labels is not None or name not in _LABEL_COLUMNS]
    lists = {"v_class": pa.list_(pa.int32()), "v_square": pa.list_(pa.float32())}
    fields = [
        pa.field(name, lists.get(name) or pa.from_numpy_dtype(columns[name].dtype), metadata={"meaning": COLUMNS[name]})
        for name in names
    ]
    schema = pa.schema(fields, metadata={"sopdist": json.dumps({**(about or {}), "provisional": saved.provisional})})
    with atomic_file(path) as file, parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        for start in range(0, saved.num_samples, _GROUP_ROWS):
            part = slice(start, start + _GROUP_ROWS)
            taken = classes[part] != FREE
            # The entries of all rows, concatenated, and the offset at which each row starts.
            offsets = np.concatenate([[0], taken.sum(1).cumsum()]).astype(np.int32)
            entries = {"v_class": classes[part][taken], "v_square": squares[part][taken]}
            arrays = [
                pa.ListArray.from_arrays(pa.array(offsets), pa.array(entries[name]))
                if name in entries
                else pa.array(columns[name][part])
                for name in names
            ]
            writer.write_batch(pa.record_batch(arrays, schema=schema))


def columns_of(saved: SavedTable, labels: NDArray[Any] | None) -> dict[str, Any]:
    """All columns except the entries of v, (N,) each; unknown values are masked."""
    table, visited = saved.table, saved.visited().numpy()
    known = None if labels is None else torch.from_numpy(np.maximum(labels, 0).astype(np.int64))
    columns = {
        "index": np.arange(saved.num_samples, dtype=np.int64),
        "score": np.ma.masked_array(saved.noise_scores().numpy(), ~visited),
        "mean_loss": np.ma.masked_array(table.mean_loss.numpy(), ~visited),
        "mean_margin": np.ma.masked_array(table.mean_margin.numpy(), ~visited),
        "mean_fit": np.ma.masked_array(table.mean_fit.numpy(), ~visited),
        "visits": table.visits.numpy(),
        "flagged": saved.flags(known).numpy(),
    }
    if labels is not None and known is not None:
        proposed = saved.proposed_labels(known).numpy()
        columns["label"] = np.ma.masked_array(labels.astype(np.int32), labels < 0)
        columns["proposed"] = np.ma.masked_array(proposed.astype(np.int32), labels < 0)
    _start(table)
    return columns | {"u": table.u.numpy()}


def top_entries(state: Mapping[str, Tensor], top: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Classes and v^2 of the `top` largest entries among those ever updated, (N, top) each, largest first.

    The class is -1 where there are fewer entries.
    """
    table = _load_table(state, slots=top)
    assert table.classes is not None
    _start(table)
    squares, order = table.v.square().sort(dim=1, descending=True, stable=True)  # a free slot holds 0
    classes = table.classes.gather(1, order)
    return classes.to(torch.int32).numpy(), squares.numpy()


def _start(table: NoiseTable) -> None:
    """End the vote of a table that does not act yet, as the onset would."""
    if table.voting:
        table.act(weigh(table.evidence()).least_confidence)


def _load_table(state: Mapping[str, Tensor], slots: int | None = None) -> NoiseTable:
    """Load the table in its own layout, or in the layout `slots` with the given number of slots."""
    try:
        _, samples, classes, seed, first, stride, layout, width, *_ = (int(value) for value in state["meta"])
        if (first, stride) != (0, 1):
            raise ValueError(f"it holds only the rows of rank {first} of {stride}")
        table = NoiseTable(
            samples,
            classes,
            layout=LAYOUTS[layout] if slots is None else "slots",
            slots=(width or 1) if slots is None else slots,
            seed=seed,
        )
        table.load_state_dict(dict(state))
    except (KeyError, IndexError, ValueError, RuntimeError) as error:
        raise DataError(f"the noise table cannot be read: {error}") from None
    return table
