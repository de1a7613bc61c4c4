"""`sopdist plan`: its estimates match the real table, plan, network and optimizer."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sopdist import cli
from sopdist.config import build
from sopdist.data.plan import NO_SAMPLE, training_plan
from sopdist.errors import ConfigError
from sopdist.methods import make_method
from sopdist.models.factory import make_model
from sopdist.models.settings import ModelSettings
from sopdist.noise.rows import NoiseTable
from sopdist.noise.sop import SOP
from sopdist.train import forecast
from sopdist.train.config import Config, load
from sopdist.train.forecast import DataSizes, NetworkSizes
from sopdist.train.optim import make_optimizer
from tests.support.small_splits import samples, write_split

CONFIG = """
data: {root: ROOT, split: train, recipe: digits}
model: {name: mlp}
train: {epochs: 10, batch: 5}
evaluate: {splits: {val: val, far: FAR/test}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config whose training split has 12 samples of three classes, and whose split `val` has 7."""
    write_split(tmp_path / "shards" / "train")
    write_split(tmp_path / "shards" / "val", samples(7))
    path = tmp_path / "pets.yaml"
    path.write_text(CONFIG.replace("ROOT", str(tmp_path / "shards")).replace("FAR", str(tmp_path / "nowhere")))
    return path


def planned(capsys: pytest.CaptureFixture[str], config: Path, ranks: int, *arguments: str) -> dict[str, Any]:
    assert cli.main(["plan", "--cfg", str(config), "--world-size", str(ranks), "--json", *arguments]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def refused(capsys: pytest.CaptureFixture[str], config: Path, ranks: int, *arguments: str) -> tuple[int, str]:
    code = cli.main(["plan", "--cfg", str(config), "--world-size", str(ranks), *arguments])
    out, err = capsys.readouterr()
    assert out == ""
    return code, err


def test_two_ranks_in_numbers(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The example in the docstring of `forecast.py`, computed manually."""
    plan = planned(capsys, config, 2)
    assert plan["data"]["samples"] == 12
    assert plan["data"]["classes"] == 3
    assert plan["steps"] == {"epoch": 3, "total": 30, "epochs": 10, "last": 2, "leading": 5}
    assert plan["shares"] == [
        {"ranks": 1, "samples": 3, "micro_batch": 3},
        {"ranks": 1, "samples": 2, "micro_batch": 2},
    ]
    assert plan["method"] == {"name": "sop", "forward_passes": 1}
    assert plan["tables"] == [{"name": "noise", "layout": "dense", "row_bytes": 32, "nbytes": 384, "rank_bytes": 192}]
    exchange = plan["exchange"]
    assert (exchange["row_bytes"], exchange["fact_bytes"], exchange["step_bytes"]) == (16, 24, 2.5 * 40)
    assert exchange["rank_bytes"] == 2.5 * 40 / 2
    assert exchange["of_dense"] == pytest.approx(40 / 32)
    assert plan["evaluation"] == [
        {"name": "val", "samples": 7, "steps": 2},
        {"name": "far", "samples": None, "steps": None},
    ]


def test_one_rank_exchanges_nothing(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, config, 1)
    assert plan["exchange"] is None
    assert plan["shares"] == [{"ranks": 1, "samples": 5, "micro_batch": 5}]
    assert plan["engine"]["name"] == "single"


def test_sizes_of_network_and_checkpoint_match_real_ones(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for optimizer, keeps in (("sgd", 1), ("adamw", 2)):
        plan = planned(capsys, config, 2, f"optim.name={optimizer}")
        network = make_model(ModelSettings("mlp"), channels=1, size=8, classes=3)
        real = make_optimizer(load(str(config), [f"optim.name={optimizer}"]).optim, network)
        network(torch.ones(2, 1, 8, 8)).sum().backward()
        real.step()
        weights = [value.numel() * value.element_size() for value in network.state_dict().values()]
        state = [
            value.numel() * value.element_size()
            for entry in real.state_dict()["state"].values()
            for name, value in entry.items()
            if name != "step"  # four bytes per tensor
        ]
        table = SOP(12, 3).table
        assert plan["network"]["parameters"] == sum(parameter.numel() for parameter in network.parameters())
        assert plan["network"]["nbytes"] == sum(weights)
        assert plan["engine"]["optimizer"] == sum(state) == keeps * plan["engine"]["gradients"]
        total = sum(weights) + sum(state) + table.nbytes
        assert plan["checkpoint"] == {"bytes": total, "kept_bytes": 4 * total + 2 * sum(weights)}


def test_each_zero_stage_partitions_one_more_kind_of_state(config: Path) -> None:
    network, ranks = NetworkSizes(1000, 1000, 4000 + 40), 4
    found = {}
    for zero in range(4):
        settings = load(str(config), ["engine.kind=deepspeed", f"engine.zero={zero}"])
        engine = forecast.engine_of(settings, network, ranks)
        found[zero] = (engine.weights, engine.gradients, engine.optimizer)
    assert found == {
        0: (4040, 4000, 4000),
        1: (4040, 4000, 2000),  # a quarter of the momentum and of a second copy of the weights
        2: (4040, 1000, 2000),
        3: (1040, 1000, 1000),
    }


@given(
    samples=st.integers(1, 300),
    classes=st.integers(2, 40),
    batch=st.integers(1, 40),
    ranks=st.integers(1, 9),
    layout=st.sampled_from(["auto", "dense", "slots"]),
)
def test_tables_and_shares_match_the_real_ones(samples: int, classes: int, batch: int, ranks: int, layout: str) -> None:
    data = DataSizes(samples, classes, samples, {})
    config = any_config(batch, layout)
    if ranks > batch:
        with pytest.raises(
            ConfigError, match=rf"train\.batch = {batch}: less than one sample per step for some of {ranks} ranks"
        ):
            forecast.check_ranks(config, ranks)
        return
    forecast.check_ranks(config, ranks)

    real = [NoiseTable(samples, classes, layout=layout, first=rank, stride=ranks).nbytes for rank in range(ranks)]
    [table] = forecast.tables_of(make_method(config.method).cost(samples, classes), data, ranks)
    assert (table.nbytes, table.rank_bytes) == (sum(real), max(real))

    order = training_plan(np.array([0, samples]), seed=0, epoch=0, global_batch=batch)
    steps = forecast.steps_of(config, data)
    assert (steps.epoch, steps.last) == (order.steps, np.count_nonzero(order.batches[-1] != NO_SAMPLE))
    parts = Counter(len(order.part(0, rank, ranks)) for rank in range(ranks))
    assert {share.samples: share.ranks for share in forecast.shares_of(config, ranks)} == parts


def test_as_many_rows_are_exchanged_as_planned() -> None:
    """Counted over a real epoch: which rank reads a sample, and which rank owns its row."""
    samples, batch, ranks = 6000, 60, 3
    order = training_plan(np.arange(0, samples + 1, 100), seed=1, epoch=0, global_batch=batch)
    travelling = sum(
        np.count_nonzero(order.part(step, rank, ranks) % ranks != rank)
        for step in range(order.steps)
        for rank in range(ranks)
    )
    config = any_config(batch, "slots")
    traffic = forecast.traffic_of(config, make_method(config.method).cost(samples, 1000), ranks)
    assert traffic is not None
    assert travelling / samples == pytest.approx(traffic.travelling, abs=0.02)
    bytes_per_sample = 4 + 8 * (4 + 2) + 24  # u; eight values with their classes in two bytes; facts
    assert traffic.step_bytes == pytest.approx(batch * 2 / 3 * bytes_per_sample)
    assert traffic.of_dense < 1 / 40, "the target of the exchange"


def test_the_last_learning_rate_and_the_milestones_are_given_in_steps(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["optim.schedule=multistep", "optim.milestones=[4, 8]", "optim.lr=1", "optim.warmup_epochs=1"]
    schedule = planned(capsys, config, 2, *overrides)["learning_rate"]
    rates = {rate["step"]: rate["lr"] for rate in schedule}
    assert rates == pytest.approx({0: 1 / 3, 3: 1, 12: 0.1, 24: 0.01, 29: 0.01})
    schedule = planned(capsys, config, 2, *overrides, "train.max_steps=20")["learning_rate"]
    assert [rate["step"] for rate in schedule] == [0, 3, 12, 19], "milestones after the end are omitted"


def test_learning_rates_that_cannot_activate_the_table_are_reported(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outlook = planned(capsys, config, 2)["outlook"]
    assert (outlook["visits"], outlook["planned"], outlook["works"]) == (5, 10, True)
    assert "cannot act" not in outlook["text"]
    slow = ["method.variant=paper", "method.alpha_v=1", "optim.lr=0.002"]
    outlook = planned(capsys, config, 2, *slow)["outlook"]
    assert outlook["visits"] > 2000
    assert not outlook["works"]
    assert cli.main(["plan", "--cfg", str(config), "--world-size", "2", *slow]) == 0
    assert "the noise table cannot act" in capsys.readouterr().out
    outlook = planned(capsys, config, 2, *slow, "optim.lr=0")["outlook"]
    assert (outlook["visits"], outlook["works"]) == (None, False)
    few = planned(capsys, config, 2, "train.max_steps=9")["outlook"]  # three epochs, of ten
    assert (few["planned"], few["works"]) == (3, False)


def test_a_balanced_epoch_visits_each_sample_less_often(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, config, 2, "data.balanced_per_epoch=6")
    assert plan["data"]["epoch_samples"] == 6
    assert plan["steps"]["epoch"] == 2
    assert plan["outlook"]["planned"] == 5


def test_samples_and_classes_replace_missing_shards(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = "data.root=/nowhere"
    code, message = refused(capsys, config, 2, elsewhere)
    assert code == 1
    assert "/nowhere/train: no such folder" in message
    assert "--samples N --classes K" in message
    plan = planned(capsys, config, 8, elsewhere, "--samples", "2000000", "--classes", "1000", "train.batch=64")
    assert plan["tables"][0]["layout"] == "slots"
    assert plan["steps"]["epoch"] == 31250
    assert plan["data"]["shards"] is None
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan", "--cfg", str(config), "--world-size", "2", "--samples", "3"])
    assert stop.value.code == 2
    assert "give both or neither" in capsys.readouterr().err


def test_overrides_may_come_anywhere_and_the_last_wins(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["plan", "train.batch=4", "--cfg", str(config), "train.batch=3", "--json", "--world-size", "2"]
    assert cli.main([*line, "train.batch=2", "run.name=a=b"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["run"], plan["steps"]["epoch"]) == ("a=b", 6)
    assert cli.main([*line, "train.batch"]) == 2
    assert "train.batch: not of the form key=value" in capsys.readouterr().err


def test_cross_entropy_has_no_table(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, config, 2, "method.name=ce")
    assert (plan["tables"], plan["exchange"], plan["outlook"]) == ([], None, None)
    assert cli.main(["plan", "--cfg", str(config), "--world-size", "2", "method.name=ce"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["sample", "tables", "none"] in rows


def test_an_invalid_config_is_refused_by_key(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, ranks, says in (
        ([], 6, "sopdist: train.batch = 5: less than one sample per step for some of 6 ranks"),
        (["evaluate.batch=1"], 2, "evaluate.batch = 1"),
        (["engine.kind=single"], 2, "engine.kind = single"),
        (["train.accumulate=3"], 2, "train.accumulate = 3"),
        (["data.balanced_per_epoch=2"], 2, "data.balanced_per_epoch = 2: fewer than one sample for each of 3 classes"),
        (["method.visits=0"], 2, "visits must be in"),
        (["method.lr_u=3"], 2, "lr_u belongs to variant='official'"),
        (["model.name=mpl"], 2, "model.name = 'mpl'"),
        (["train.bacth=3"], 2, "train.bacth: no such key; did you mean train.batch?"),
    ):
        code, message = refused(capsys, config, ranks, *arguments)
        assert (code, message.startswith("sopdist: "), says in message) == (2, True, True), message
        assert "Traceback" not in message
    code, message = refused(capsys, config.with_name("none.yaml"), 2)
    assert code == 2
    assert "no such file" in message


def test_a_network_that_cannot_be_built_here_does_not_stop_the_plan(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("timm", "torchvision"):
        broken = tmp_path / "broken" / name
        broken.mkdir(parents=True)
        (broken / "__init__.py").write_text("raise ImportError('half an installation')\n")
        for loaded in [module for module in sys.modules if module.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.syspath_prepend(str(tmp_path / "broken"))
    plan = planned(capsys, config, 2, "model.name=resnet50", "data.recipe=imagenet")
    assert plan["network"] is None
    assert "half an installation" in plan["network_problem"]
    assert plan["steps"]["epoch"] == 3


def test_the_table_is_aligned_and_names_its_units(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--cfg", str(config), "--world-size", "2"]) == 0
    title, _, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("plan of pets on 2 ranks, sizes from ")
    sections = [line for line in lines if not line.startswith(" ")]
    starts = {len(line) - len(line[line.index("  ") :].lstrip()) for line in sections}
    assert len(starts) == 1, "the second column is aligned"
    text = "\n".join(lines)
    for claim in ("the batch cannot be split evenly", "384 bytes", "both ways", "KiB"):
        assert claim in text


def any_config(batch: int, layout: str) -> Config:
    """A config without a file."""
    return build(
        Config,
        {
            "data": {"root": "", "recipe": "digits"},
            "model": {"name": "mlp"},
            "train": {"epochs": 1, "batch": batch},
            "method": {"layout": layout},
        },
    )


def test_a_method_whose_batches_have_several_parts(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DivideMix with a batch of 5: two labelled samples for each network, so at most 6 steps; 8 samples in a step."""
    plan = planned(capsys, config, 2, "method={name: dividemix}")
    assert plan["steps"] == {"epoch": 6, "total": 60, "epochs": 10, "last": 2, "leading": 2}
    assert plan["shares"] == [{"ranks": 2, "samples": 4, "micro_batch": 4}]
    assert plan["exchange"]["step_bytes"] == 8 / 2 * 8
    assert cli.main(["plan", "--cfg", str(config), "--world-size", "2", "method={name: dividemix}"]) == 0
    assert "at most" in capsys.readouterr().out


def test_averaged_weights_are_part_of_the_plan(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, averaged = planned(capsys, config, 2), planned(capsys, config, 2, "train.ema=0.9")
    extra = plain["network"]["nbytes"]
    assert averaged["engine"]["weights"] == plain["engine"]["weights"] + extra
    assert averaged["checkpoint"]["bytes"] == plain["checkpoint"]["bytes"] + extra
