"""The noise table as Parquet: a row for each sample, for whoever looks for wrong labels with pandas, DuckDB or Spark.

Knows what a table can say (`noise/reading.py`), not how it was saved.
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

from ...data.errors import DataError
from ...files import whole_file
from ...noise.reading import Reading
from ...noise.rows import NoiseTable
from ...noise.saved import FREE, LAYOUTS
from .extras import need

NAME = "noise.parquet"
TOP = 8  # entries of v in a row
COLUMNS = {
    "index": "number of the sample, as everywhere in sopdist",
    "label": "class number it was trained with; null if it had none",
    "score": "how suspicious the label is: higher is worse; null if the sample was never visited",
    "mean_loss": "running mean of the network's loss on the label; what score is",
    "mean_margin": "running mean of p of the label minus the largest other p; -1 to 1, low is suspicious",
    "visits": "how often the sample was trained on",
    "flagged": "the table has explained the label away in favour of a class: some v^2 > 1 - u^2",
    "proposed": "class number to look at: that class if flagged, else the label; null if there was no label",
    "u": "what the table has learned at the label; u^2 is added to the prediction there",
    "v_class": "classes with the largest v^2, largest first, of those that ever moved",
    "v_square": "their v^2, which is taken off the prediction there",
}
_OF_LABELS = ("label", "proposed")
_ROWS = 1 << 17  # of a row group


class SavedTable(Reading):
    """A whole saved table, on one rank."""

    exchange = None

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.table = _loaded(state)


def write_noise(
    path: Path,
    state: Mapping[str, Tensor],
    labels: NDArray[Any] | None = None,
    *,
    top: int = TOP,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write a saved table of all samples, whole or not at all.

    labels: (N,) class numbers, negative for none; without them the columns `label` and `proposed` are left out.
    about: notes for the file's metadata, under the key `sopdist`, as JSON.
    """
    need("pyarrow", "pyarrow.parquet", what="noise")
    import pyarrow as pa
    from pyarrow import parquet

    saved = SavedTable(state)
    columns = columns_of(saved, labels)
    classes, squares = top_entries(state, top)
    names = [name for name in COLUMNS if labels is not None or name not in _OF_LABELS]
    lists = {"v_class": pa.list_(pa.int32()), "v_square": pa.list_(pa.float32())}
    fields = [
        pa.field(name, lists.get(name) or pa.from_numpy_dtype(columns[name].dtype), metadata={"meaning": COLUMNS[name]})
        for name in names
    ]
    schema = pa.schema(fields, metadata={"sopdist": json.dumps(dict(about or {}))})
    with whole_file(path) as file, parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        for start in range(0, saved.num_samples, _ROWS):
            part = slice(start, start + _ROWS)
            taken = classes[part] != FREE
            # The entries of all rows one after the other, and where each row begins.
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
    """All columns but the entries of v, (N,) each; what is not known is masked."""
    table, visited = saved.table, saved.visited().numpy()
    known = None if labels is None else torch.from_numpy(np.maximum(labels, 0).astype(np.int64))
    columns = {
        "index": np.arange(saved.num_samples, dtype=np.int64),
        "score": np.ma.masked_array(saved.noise_scores().numpy(), ~visited),
        "mean_loss": np.ma.masked_array(table.mean_loss.numpy(), ~visited),
        "mean_margin": np.ma.masked_array(table.mean_margin.numpy(), ~visited),
        "visits": table.visits.numpy(),
        "flagged": saved.flags(known).numpy(),
        "u": table.u.numpy(),
    }
    if labels is not None and known is not None:
        proposed = saved.proposed_labels(known).numpy()
        columns["label"] = np.ma.masked_array(labels.astype(np.int32), labels < 0)
        columns["proposed"] = np.ma.masked_array(proposed.astype(np.int32), labels < 0)
    return columns


def top_entries(state: Mapping[str, Tensor], top: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Classes and v^2 of the `top` largest entries that ever moved, (N, top) each, largest first; class -1 where there
    are fewer."""
    table = _loaded(state, slots=top)
    assert table.classes is not None
    squares, order = table.v.square().sort(dim=1, descending=True, stable=True)  # a free slot holds 0
    classes = table.classes.gather(1, order)
    return classes.to(torch.int32).numpy(), squares.numpy()


def _loaded(state: Mapping[str, Tensor], slots: int | None = None) -> NoiseTable:
    """The table in its own layout, or with so many slots."""
    try:
        _, samples, classes, seed, first, stride, layout, width = (int(number) for number in state["meta"])
        if (first, stride) != (0, 1):
            raise ValueError(f"it holds the rows of rank {first} of {stride} only")
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
