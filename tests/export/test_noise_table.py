"""noise.parquet holds the readout of the noise table, one row per sample, for either layout."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet
from torch import Tensor

from sopdist import SOP
from sopdist.errors import DataError
from sopdist.export import noise_table
from sopdist.export.noise_table import COLUMNS, write_noise
from tests.support.batches import LAYOUTS

torch.set_num_threads(1)
SAMPLES, CLASSES, UNSEEN = 23, 6, (4, 11)


def learned(layout: Any, **options: Any) -> tuple[SOP, Tensor, Tensor]:
    """A table after twelve visits with a network that disagrees with every fourth label; the labels and the logits."""
    generator = torch.Generator().manual_seed(0)
    sop = SOP(SAMPLES, CLASSES, onset="always", layout=layout, seed=5, **options)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    logits = torch.randn(SAMPLES, CLASSES, generator=generator)
    logits[torch.arange(SAMPLES), labels] += 4
    wrong = torch.arange(0, SAMPLES, 4)
    logits[wrong, (labels[wrong] + 1) % CLASSES] += 9
    seen = torch.tensor([sample for sample in range(SAMPLES) if sample not in UNSEEN])
    for visit in range(12):
        shaken = logits + 3 * torch.randn(SAMPLES, CLASSES, generator=generator) * (visit % 3 == 2)
        sop(shaken[seen], labels[seen], seen)
    return sop, labels, logits


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    return rows


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_matches_the_readout_of_the_table(tmp_path: Path, layout: str) -> None:
    sop, labels, _ = learned(layout)
    write_noise(tmp_path / "n.parquet", sop.table.state_dict(), labels.numpy().astype(np.int32))
    rows = rows_of(tmp_path / "n.parquet")
    assert [row["index"] for row in rows] == list(range(SAMPLES))
    assert list(rows[0]) == list(COLUMNS)
    dense = sop.table.dense_v(torch.arange(SAMPLES)).square()
    flags, proposed = sop.flags(labels), sop.proposed_labels(labels)
    assert 0 < int(flags.sum()) < SAMPLES
    for sample, row in enumerate(rows):
        assert row["label"] == labels[sample]
        assert row["u"] == float(sop.table.u[sample])
        assert row["visits"] == (0 if sample in UNSEEN else 12)
        assert (row["flagged"], row["proposed"]) == (bool(flags[sample]), int(proposed[sample]))
        if sample in UNSEEN:
            assert (row["score"], row["mean_loss"], row["mean_margin"]) == (None, None, None)
            assert (row["v_class"], row["v_square"]) == ([], [])
            continue
        assert row["score"] == float(sop.noise_scores()[sample])
        assert row["mean_loss"] == float(sop.table.mean_loss[sample])
        assert row["mean_margin"] == float(sop.table.mean_margin[sample])
        assert row["v_square"] == sorted(row["v_square"], reverse=True)
        assert row["v_square"] == [float(dense[sample, class_]) for class_ in row["v_class"]]
        rest = [float(dense[sample, class_]) for class_ in range(CLASSES) if class_ not in row["v_class"]]
        assert max(rest) < 1e-12  # all entries that were ever updated are listed
    assert max(len(row["v_class"]) for row in rows) > 1


def test_both_layouts_give_the_same_file(tmp_path: Path) -> None:
    for layout in ("dense", "slots"):
        sop, labels, _ = learned(layout)
        write_noise(tmp_path / layout, sop.table.state_dict(), labels.numpy())
    assert rows_of(tmp_path / "dense") == rows_of(tmp_path / "slots")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_the_largest_entries_are_written_and_flags_do_not_depend_on_their_number(
    tmp_path: Path, layout: str
) -> None:
    sop, labels, _ = learned(layout)
    for top in (1, 8):
        write_noise(tmp_path / str(top), sop.table.state_dict(), labels.numpy(), top=top)
    one, all_ = rows_of(tmp_path / "1"), rows_of(tmp_path / "8")
    for few, many in zip(one, all_, strict=True):
        assert few["v_class"] == many["v_class"][:1]
        assert few["v_square"] == many["v_square"][:1]
        assert (few["flagged"], few["proposed"]) == (many["flagged"], many["proposed"])


def test_without_labels_their_columns_are_omitted(tmp_path: Path) -> None:
    sop, _, _ = learned("slots")
    write_noise(tmp_path / "n.parquet", sop.table.state_dict())
    rows = rows_of(tmp_path / "n.parquet")
    assert list(rows[0]) == [name for name in COLUMNS if name not in ("label", "proposed")]
    assert [row["flagged"] for row in rows] == sop.flags().tolist()


def test_a_sample_without_a_label_has_no_proposed_label(tmp_path: Path) -> None:
    sop, labels, _ = learned("dense")
    given = labels.numpy().astype(np.int32)
    given[list(UNSEEN)] = -1
    write_noise(tmp_path / "n.parquet", sop.table.state_dict(), given)
    for row in rows_of(tmp_path / "n.parquet"):
        assert (row["label"] is None) == (row["proposed"] is None) == (row["index"] in UNSEEN)


def test_many_row_groups_give_the_same_table_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sop, labels, _ = learned("slots")
    write_noise(tmp_path / "one", sop.table.state_dict(), labels.numpy())
    monkeypatch.setattr(noise_table, "_GROUP_ROWS", 4)
    write_noise(tmp_path / "many", sop.table.state_dict(), labels.numpy())
    assert parquet.ParquetFile(tmp_path / "many").num_row_groups == 6
    assert rows_of(tmp_path / "many") == rows_of(tmp_path / "one")


def test_the_metadata_explains_the_columns_and_the_origin(tmp_path: Path) -> None:
    sop, labels, _ = learned("slots")
    write_noise(tmp_path / "n.parquet", sop.table.state_dict(), labels.numpy(), about={"step": 7})
    schema = parquet.read_schema(tmp_path / "n.parquet")
    assert json.loads(schema.metadata[b"sopdist"]) == {"step": 7, "provisional": False}
    for field in schema:
        assert field.metadata[b"meaning"].decode() == COLUMNS[field.name]


def test_a_partial_or_damaged_table_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    sop, labels, _ = learned("slots")
    state = sop.table.state_dict()
    meta = state["meta"].clone()
    meta[5] = 2
    nan = state["u"].clone()
    nan[3] = torch.nan
    for change, message in (
        ({"meta": meta}, "it holds only the rows of rank 0 of 2"),
        ({"u": nan}, "'u' contains values that are not finite"),
        ({"u": state["u"][:5]}, "'u' must have shape"),
        ({"meta": state["meta"][:3]}, "the noise table cannot be read"),
    ):
        with pytest.raises(DataError, match=message):
            write_noise(tmp_path / "n.parquet", {**state, **change}, labels.numpy())
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sop, labels, _ = learned("slots")
    write_noise(tmp_path / "n.parquet", sop.table.state_dict(), labels.numpy())
    before = (tmp_path / "n.parquet").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parquet.ParquetWriter, "write_batch", full)
    with pytest.raises(OSError, match="No space left"):
        write_noise(tmp_path / "n.parquet", sop.table.state_dict(), labels.numpy())
    assert (tmp_path / "n.parquet").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["n.parquet"]


def test_the_documentation_lists_every_column_in_order() -> None:
    text = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    assert re.findall(r"^\| `([a-z_]+)` \| (?:int|float|bool|list)", text, re.MULTILINE) == list(COLUMNS)
