"""A checkpoint of format 2, really written by the sopdist of that time on two ranks, loads with today's names.

`format-2/` is from a run of 61 images, 7 classes and 3 epochs with a noise table of three slots per row.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from sopdist import SOP
from sopdist.checkpoint import names, open_checkpoint, verify_checkpoint
from sopdist.checkpoint.resharding import write_for
from sopdist.models import make_model
from sopdist.models.settings import ModelSettings
from sopdist.train.record.metrics_file import read_lines
from sopdist.train.run import run_config
from sopdist.train.saving.fingerprint import saved_fingerprint
from tests.support.grey_images import write_images

OLD = Path(__file__).parent / "format-2"
SAMPLES, CLASSES = 61, 7
# Of the 14 steps after it, as the sopdist of that time computed them when it resumed from it on one rank.
LOSSES = [
    0.7344861560, 0.4302712811, 0.8480879466, 0.7498386701, 0.6521485647, 0.7855927679, 0.7515974726,
    0.4468185107, 0.5760391023, 0.5581081178, 0.7148794598, 0.6317521201, 0.4557007684, 0.4358261994,
]  # fmt: skip


def test_it_is_intact_and_says_what_it_is() -> None:
    saved = verify_checkpoint(OLD)
    assert (saved.format, saved.step, saved.ranks) == (2, 21, 2)
    fingerprint = saved_fingerprint(saved.fingerprint)
    assert fingerprint["method.name"] == "sop"
    assert fingerprint["method.variant"] == "flow"
    assert fingerprint["steps per epoch"] == 7
    assert not any(key.startswith("objective") for key in fingerprint if key != "objective.layout")


def test_every_section_has_its_new_name() -> None:
    saved = open_checkpoint(OLD)
    sections = {name.split("/")[0] for name in saved.tensors}
    assert sections == {"network", "optimizer", "tables", "step_metrics"}  # this network has no batch statistics
    assert saved.table_names == ["noise"]
    assert names.from_format_2("sound/bn.running_mean") == "last_finite_statistics/bn.running_mean"
    assert names.from_format_2("statistics/0/bn.running_mean") == "statistics/0/bn.running_mean"
    for rank in range(2):
        sums = saved.step_metrics(rank, 2)
        assert sums is not None
        assert not sums[:-1].any(), "the last line of metrics.jsonl was written before the checkpoint"


def test_network_and_table_load() -> None:
    saved = open_checkpoint(OLD)
    network = make_model(ModelSettings("small_conv"), channels=1, size=8, classes=CLASSES)
    network.load_state_dict(saved.network())
    sop = SOP(SAMPLES, CLASSES, layout="slots", slots=3)
    sop.table.load_state_dict(saved.table("noise"))
    assert bool(sop.visited().all())
    assert sop.table.visits.tolist() == [3] * SAMPLES
    for rank in range(3):
        rows = saved.table("noise", rank, 3)
        assert torch.equal(rows["u"], sop.table.u[rank::3])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_resharding_writes_it_in_todays_format(ranks: int, tmp_path: Path) -> None:
    old = open_checkpoint(OLD)
    write_for(tmp_path / "new", old, ranks)
    new = verify_checkpoint(tmp_path / "new")
    assert (new.format, new.ranks) == (3, ranks)
    for name, column in old.table("noise").items():
        assert torch.equal(new.table("noise")[name], column), name
    for name, weight in old.network().items():
        assert torch.equal(new.network()[name], weight), name


def test_a_run_resumes_from_it_as_it_did_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "shards" / "train", SAMPLES)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(open_checkpoint(OLD).config))
    assert run_config("tiny.yaml", ["train.epochs=5"], resume=str(OLD)) == 0
    found = [line["loss"] for line in read_lines(tmp_path / "runs/tiny/metrics.jsonl") if line["kind"] == "train"]
    assert found == pytest.approx(LOSSES, abs=1e-4)  # other machines round differently
