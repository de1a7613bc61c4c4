"""From a request to runs: each with the settings of its method, and no run if there is a mistake anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from sopdist.cli import main
from sopdist.compare.plan import Comparison, Request, make_comparison
from sopdist.config import to_tree
from sopdist.errors import ConfigError
from sopdist.train.config import Config, load
from tests.compare.conftest import CONFIG, compare

pytestmark = pytest.mark.usefixtures("workspace")


def plan(methods: str, noise: tuple[str, ...] = (), overrides: tuple[str, ...] = (), test: str = "") -> Comparison:
    return make_comparison(Request("tiny.yaml", methods, (0, 5), noise, overrides, test, Path("out")))


def config_of(comparison: Comparison, name: str) -> Config:
    (run,) = (run for run in comparison.runs() if run.name == name)
    return load(run.arguments[0], run.arguments[1:])


def test_a_comparison_is_every_method_on_every_label_set_with_every_seed() -> None:
    comparison = plan("ce,gce:q=0.5", noise=("wrong", "sym-0.4"), overrides=("train.epochs=3",))
    names = [run.name for run in comparison.runs()]
    assert names == [
        f"{method}-{labels}-seed{seed}"
        for labels in ("wrong", "sym-0.4-seed0")
        for seed in (0, 5)
        for method in ("ce", "gce-q-0.5")
    ]
    for run in comparison.runs():
        config = config_of(comparison, run.name)
        assert (config.run.name, config.run.folder, config.run.seed) == (run.name, "out/runs", run.seed)
        assert (config.data.labels, config.train.epochs) == (run.labels, 3)
    section = to_tree(config_of(comparison, "gce-q-0.5-wrong-seed5").method)
    assert (section["name"], section["q"]) == ("gce", 0.5)


def test_only_the_method_of_the_config_inherits_its_section() -> None:
    comparison = plan("ce,sop,sop:visits=3,sop:optim.lr=0.5")
    sections = [to_tree(comparison.configs[entry].method) for entry in comparison.entries]
    assert sections[0] == {"name": "ce"}
    assert [section["visits"] for section in sections[1:]] == [1.5, 3, 1.5]
    assert [comparison.configs[entry].optim.lr for entry in comparison.entries] == [0.05, 0.05, 0.05, 0.5]


def test_a_method_may_have_a_config_of_its_own_and_shares_the_overrides_and_the_labels(workspace: Path) -> None:
    own = CONFIG.replace("visits: 1.5", "visits: 7").replace("labels: wrong", "labels: clean")
    (workspace / "own.yaml").write_text(own)
    comparison = plan("sop@own.yaml,sop", overrides=("train.batch=8",))
    config = config_of(comparison, "sop-own-wrong-seed0")
    assert to_tree(config.method)["visits"] == 7
    assert (config.train.batch, config.data.labels) == (8, "wrong")
    with pytest.raises(ConfigError, match=r"--methods gce@own.yaml: own.yaml: its method is sop, not gce"):
        plan("gce@own.yaml")
    (workspace / "own.yaml").write_text(own.replace("test: test", "test: val"))
    with pytest.raises(ConfigError, match=r"evaluate.splits = .*: must be the same for all methods"):
        plan("ce,sop@own.yaml")


def test_all_mistakes_are_found_before_anything_runs_or_is_written(
    workspace: Path, capsys: pytest.CaptureFixture[str], trained: list[str]
) -> None:
    wrong = "ce,gce:q=5,ce:q=0.5,sop:eps=2,sop:visits=-1,ce:model.name=small_conf,ce@nowhere.yaml"
    assert compare("--methods", wrong) == 2
    error = capsys.readouterr().err
    for part in (
        "--methods gce:q=5: method.q = 5.0: must be more than 0",
        "--methods ce:q=0.5: method.q: belongs to method.name = gce",
        "--methods sop:eps=2: method: ",
        "--methods sop:visits=-1: method: ",
        "--methods ce:model.name=small_conf: model.name",
        "--methods ce@nowhere.yaml: --cfg nowhere.yaml: no such file",
    ):
        assert part in error, part
    assert not trained
    assert not (workspace / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run.name=x"], "run.name=x: cannot be set here; runs are named after"),
        (["method.q=0.5"], "method.q=0.5: write settings after the name of their method"),
        (["data.labels=given", "--noise", "wrong"], "data.labels=given: cannot be combined with --noise"),
        (["train.epoch=3"], "train.epoch: no such key; did you mean train.epochs?"),
        (["--noise", "wrng"], "--noise wrng: shards/train has no such label set (it has clean, given, wrong)"),
        (["--noise", "sym-4"], "--noise sym-4: '4' is not a number from 0 to 1"),
        (["--noise", "sym-0.4,symmetric-0.40"], "the label set sym-0.4-seed0 is there twice"),
        (["data.labels=wrng"], "data.labels wrng: shards/train has no such label set"),
        (["--test", "tset"], "--test tset: not one of evaluate.splits, which are val, test"),
        (["evaluate.splits={val: val}"], "which of evaluate.splits is the test split? They are val"),
        (["data.root=nowhere"], "nowhere/train"),
        (["evaluate.splits={test: nowhere}"], "shards/nowhere"),
        (["evaluate.labels=nothing"], "no label set 'nothing'"),
        (["--task", "2"], "--task 2: must be from 0 to 1; there are 2 runs"),
    ],
)
def test_mistakes_in_the_options_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], workspace: Path
) -> None:
    assert compare("--methods", "ce", "--seeds", "2", *arguments) in (1, 2)
    assert message in capsys.readouterr().err
    assert not (workspace / "out").exists()


def test_the_test_split_is_the_one_that_is_not_used_for_validation() -> None:
    def splits(comparison: Comparison) -> tuple[str, str]:
        return comparison.test, comparison.validations["wrong"].split

    assert splits(plan("ce")) == ("test", "val")
    assert splits(plan("ce", overrides=("evaluate.splits={val: val, new: test}",))) == ("new", "val")
    assert splits(plan("ce", overrides=("evaluate.splits={a: val, b: test}", "evaluate.best=b"))) == ("a", "b")
    assert plan("ce", test="val").validations == {}, "test labels must not choose"


def test_runs_are_validated_on_the_noise_of_their_training_labels() -> None:
    comparison = plan("ce", noise=("wrong", "sym-0.4", "given"))
    sets = {run.labels: config_of(comparison, run.name).evaluate.label_sets for run in comparison.runs()}
    assert sets == {"wrong": {"val": "wrong"}, "sym-0.4-seed0": {"val": "sym-0.4-seed0"}, "given": {}}
    chosen = plan("ce", overrides=("evaluate.label_sets={val: clean}",))
    assert config_of(chosen, "ce-wrong-seed0").evaluate.label_sets == {"val": "clean"}, "as the user wants it"


def test_a_dry_run_lists_the_runs_and_writes_nothing(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(workspace.rglob("*"))
    assert compare("--methods", "ce,sop", "--seeds", "1", "--noise", "sym-0.4", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "0  ce-sym-0.4-seed0-seed0   not started" in out
    assert out.endswith("would create label set sym-0.4-seed0\nwould create label set sym-0.4-seed0 of val\n")
    assert compare("--methods", "ce,sop", "--seeds", "1", "--noise", "wrong", "--dry-run", "--task", "1") == 0
    path, *overrides = capsys.readouterr().out.splitlines()
    config = load(path, overrides)
    assert (config.method.name, config.run.name, config.data.labels) == ("sop", "sop-wrong-seed0", "wrong")
    assert sorted(workspace.rglob("*")) == before


def test_help_explains_how_methods_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["compare", "--help"])
    assert stop.value.code == 0
    assert "NAME:key=value:key=value" in capsys.readouterr().out
