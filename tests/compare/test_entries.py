"""Methods as users write them: their parts, the names of their runs, and messages about mistakes."""

from __future__ import annotations

import pytest

from sopdist.cli.commands.compare import _names, _seeds
from sopdist.compare.entries import Entry, parse_entries
from sopdist.errors import ConfigError


def test_a_method_may_have_settings_other_config_keys_and_a_config_of_its_own() -> None:
    text = "ce,gce:q=0.5:optim.lr=0.01, sop@more/plus.yaml:visits=2,sop"
    assert parse_entries(text) == (
        Entry("ce", "ce"),
        Entry("gce:q=0.5:optim.lr=0.01", "gce", "", ("method.q=0.5", "optim.lr=0.01")),
        Entry("sop@more/plus.yaml:visits=2", "sop", "more/plus.yaml", ("method.visits=2",)),
        Entry("sop", "sop"),
    )


def test_commas_in_brackets_and_colons_in_values_do_not_separate() -> None:
    (entry,) = parse_entries("ce:optim.milestones=[1, 2]:model.weights=https://host:80/a.pt:train.clip=1")
    assert entry.overrides == ("optim.milestones=[1, 2]", "model.weights=https://host:80/a.pt", "train.clip=1")


def test_entries_of_one_method_have_names_of_their_own_that_do_not_depend_on_the_others() -> None:
    entries = parse_entries("gce,gce:q=0.5,gce:q=0.9:optim.lr=1e-3,sop@a/plus.yaml,ce:optim.milestones=[1, 2]")
    names = ["gce", "gce-q-0.5", "gce-q-0.9-optim.lr-1e-3", "sop-plus", "ce-optim.milestones-1-2"]
    assert [entry.name for entry in entries] == names
    assert [parse_entries(entry.text)[0].name for entry in entries] == names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ce,gec", "--methods gec: no method 'gec'; did you mean gce? There are: ce, "),
        ("ce,", "no method ''"),
        ("gce:q", "--methods gce:q: a setting must have the form key=value"),
        ("sop@", "no config after the @"),
        ("ce,gce,ce", "--methods ce: it is there twice"),
        ("gce:q=0.5,gce:q= 0.5", "too similar to gce:q=0.5; runs of both would be called gce-q-0.5"),
        ("gce:name=ce", "--methods gce:name=ce: the method is gce"),
        ("ce:run.seed=3", "run.seed=3: cannot be set here; use --seeds"),
        ("ce:run.folder=x", "cannot be set here; use --out"),
        ("ce:data.labels=given", "all methods train on the same labels; use --noise"),
        (f"ce:model.name={'a' * 100}", "too long for the name of a run"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as stop:
        parse_entries(text)
    assert message in str(stop.value)


def test_seeds_are_a_number_or_a_list() -> None:
    assert _seeds("3") == (0, 1, 2)
    assert _seeds("0,5,7") == (0, 5, 7)
    for wrong in ("0", "-1", "x", "1,1", "1,", "1,x"):
        with pytest.raises(Exception, match=r"is not an integer|has a seed twice"):
            _seeds(wrong)
    assert _names("a, b") == ("a", "b")
    with pytest.raises(Exception, match="has an empty name"):
        _names("a,,b")
