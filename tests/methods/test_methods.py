"""What the trainer relies on, for every method: settings, config, cost, and a run that resumes exactly."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from sopdist.config import ConfigError, OneOf, describe
from sopdist.methods import DEFAULT, METHODS, make_method, settings_of_methods
from sopdist.methods.ce import CESettings
from sopdist.methods.pair import PairMethod
from sopdist.methods.sop import SOPSettings
from sopdist.train.config import Config, load, read_config, upgrade

BASE = {"data": {"root": "shards", "recipe": "digits"}, "model": {"name": "mlp"}, "train": {"epochs": 1, "batch": 8}}


def write(folder: Path, tree: dict[str, object]) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(BASE | tree))
    return path


@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_be_chosen_by_name_and_says_what_it_costs(name: str, tmp_path: Path) -> None:
    config = read_config(write(tmp_path, {"method": {"name": name}}))
    assert type(config.method) is METHODS[name].Settings
    method = make_method(config.method)
    assert method.name == name
    cost = method.cost(samples=1000, classes=10)
    assert cost.forward_passes >= 1
    assert all(table.row_bytes > 0 for table in cost.tables)
    assert settings_of_methods()[name](name=name) == config.method


def test_without_a_name_the_default_is_meant(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, {})).method.name == DEFAULT
    assert read_config(write(tmp_path, {"method": {"visits": 7}})).method == SOPSettings(visits=7)


def test_a_key_of_another_method_is_an_error_that_says_whose_it_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"method\.visits: belongs to method\.name = sop, not to gce; remove it"):
        read_config(write(tmp_path, {"method": {"name": "gce", "visits": 3}}))
    with pytest.raises(ConfigError, match=r"method\.q: belongs to method\.name = gce, not to sop"):
        read_config(write(tmp_path, {"method": {"q": 0.5}}))
    with pytest.raises(ConfigError, match=r"method\.vists: no such key; did you mean method\.visits\?"):
        read_config(write(tmp_path, {"method": {"vists": 3}}))
    with pytest.raises(ConfigError, match=r"method\.name = 'spo': must be one of ce, sop, .*; did you mean sop"):
        read_config(write(tmp_path, {"method": {"name": "spo"}}))
    with pytest.raises(ConfigError, match="method: is a section"):
        read_config(write(tmp_path, {"method": "sop"}))


BAD_VALUES = {
    "gce": ["q=0", "q=1.5", "truncate=-0.1", "truncate=1", "prune_from=-1", "prune_every=0", "holdout=0", "holdout=1"],
    "sl": ["alpha=-1", "beta=.inf", "log_zero=0"],
    "forward": ["first_epochs=0", "holdout=0", "holdout=1", "percentile=0", "percentile=100.1"],
    "mixup": ["alpha=0", "alpha=.inf"],
    "coteaching": ["forget=-0.1", "forget=1", "ramp=0", "exponent=0", "exponent=.inf"],
    "coteaching_plus": ["forget=1", "ramp=0", "warmup=-1", "agree_steps=-1"],
    "elr": ["strength=-1", "strength=.nan", "beta=1", "beta=-0.1"],
    "elr_plus": ["beta=1", "mixup_alpha=-1", "ema=1", "ema=-0.1", "ema_ramp=-1", "strength_ramp=-1"],
    "dividemix": [
        "warmup=0", "threshold=0", "threshold=1", "unlabelled_weight=-1", "ramp=0", "temperature=0", "mixup_alpha=0",
        "history=0", "history=101",
    ],
    "cores2": ["strength=-1", "strength=.inf", "warmup=-1", "ramp_end=-1", "sieve_from=-1"],
    "cores2_star": ["strength=-1", "sieve_epochs=0", "consistency=-1", "unlabelled=0", "unlabelled=1"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "bad"), [(name, bad) for name, values in BAD_VALUES.items() for bad in values])
def test_settings_out_of_range_name_the_key(name: str, bad: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"method\.{bad.split('=')[0]} = "):
        read_config(write(tmp_path, {}), [f"method.name={name}", f"method.{bad}"])


def test_a_config_with_the_old_section_loads_with_a_note_that_names_the_new_one(tmp_path: Path) -> None:
    notes: list[str] = []
    path = write(tmp_path, {"objective": {"name": "sop", "visits": 5, "layout": "slots"}})
    config = load(str(path), ["objective.slots=3"], notes.append)
    assert config.method == SOPSettings(visits=5, layout="slots", slots=3)
    assert any("`objective:` has been renamed to `method:`; please update the file" in note for note in notes)
    assert any("objective.slots=3: `objective.*` has been renamed to `method.*`" in note for note in notes)
    as_ce = load(str(path), ["objective.name=sop", "objective.name=ce"], notes.append)
    assert as_ce.method == CESettings(), "the old section ignored keys of another method"
    with pytest.raises(ConfigError, match="objective: and method: are the same section"):
        read_config(write(tmp_path, {"objective": {}, "method": {}}))


def test_keys_that_the_old_section_ignored_are_ignored_still(tmp_path: Path) -> None:
    """A resolved config of a cross-entropy run had all keys of SOP, without effect."""
    old = {"objective": {"name": "ce", "variant": "flow", "visits": None, "slots": 8, "layout": "auto"}}
    assert read_config(write(tmp_path, dict(old)), note=lambda _: None).method == CESettings()
    with pytest.raises(ConfigError, match="no such key"):
        read_config(write(tmp_path, {"objective": {"name": "ce", "visitz": 3}}), note=lambda _: None)
    assert upgrade({"method": {"name": "ce"}}) == {"method": {"name": "ce"}}


def test_help_lists_the_keys_of_every_method() -> None:
    text = describe(Config)
    assert f"method.name: {' | '.join(METHODS)} = 'sop'" in text
    for name, kind in settings_of_methods().items():
        assert f"# method.name = {name}: " in text
        for field in dataclasses.fields(kind):
            if field.name != "name":
                assert f"method.{field.name}: " in text


def test_one_of_keeps_what_is_a_section_already() -> None:
    assert OneOf(settings_of_methods, DEFAULT).kinds()[DEFAULT] is METHODS[DEFAULT].Settings


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if not issubclass(method, PairMethod)])
def test_one_network_is_the_plain_one_and_predicts_alone(name: str) -> None:
    method = make_method(METHODS[name].Settings(name=name))
    network = method.build_network(lambda: nn.Linear(3, 2))
    images = torch.ones(4, 3)
    assert isinstance(network, nn.Linear)
    assert torch.equal(method.predict(network, images), network(images))


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if issubclass(method, PairMethod)])
def test_of_two_networks_the_mean_predicts_and_the_first_is_exported(name: str) -> None:
    """Co-teaching predicts with the first alone, as published, unless `ensemble` is set."""
    kind = METHODS[name].Settings
    ensemble = {"ensemble": True} if name.startswith("coteaching") else {}
    method = make_method(kind(name=name, **ensemble))
    backbones = [nn.Linear(3, 2) for _ in range(4)]
    made = iter(backbones)
    network = method.build_network(lambda: next(made))
    images = torch.randn(4, 3)
    first, second = backbones[0](images), backbones[1](images)
    torch.testing.assert_close(method.predict(network, images), (first + second) / 2)
    if ensemble:
        torch.testing.assert_close(make_method(kind(name=name)).predict(network, images), first)
    exported = method.backbone_weights(network.state_dict())
    assert exported.keys() == backbones[0].state_dict().keys()
    assert all(torch.equal(value, backbones[0].state_dict()[key]) for key, value in exported.items())
