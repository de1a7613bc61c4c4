"""Typed configs: valid values are converted to their types, and errors name the key and how to fix it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sopdist.config import OneOf, build, comments_of, describe, load_config, to_tree, to_yaml
from sopdist.data.settings import DataSettings
from sopdist.errors import ConfigError


@dataclass(frozen=True)
class Optim:
    """The optimizer."""

    lr: float = 0.1  # learning rate
    kind: Literal["sgd", "adamw"] = "sgd"  # which optimizer
    log: Literal["on", "off"] = "on"  # words that YAML parses as true and false
    milestones: tuple[int, ...] = ()  # epochs after which the learning rate is divided by ten
    betas: tuple[float, float] = (0.9, 0.999)  # of adamw


@dataclass(frozen=True)
class Run:
    """A made-up config."""

    name: str  # of the run; there is no default
    seed: int = 0  # of everything
    compile: bool = False  # with torch.compile
    clip: float | None = None  # largest norm of the gradient
    splits: dict[str, str] = field(default_factory=dict)  # evaluation splits: name and folder
    optim: Optim = field(default_factory=Optim)


def load(tmp_path: Path, text: str, *overrides: str) -> Run:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(Run, path, overrides)


def test_a_file_and_overrides_become_typed_values(tmp_path: Path) -> None:
    text = "name: a\noptim:\n  lr: 1e-3\n  milestones: [40, 80]\nsplits:\n  val: shards/val\n"
    run = load(tmp_path, text, "seed=7", "optim.kind=adamw", "clip=5", "optim.betas=[0.8, 0.9]", "splits.test=x")
    assert run == Run(
        name="a", seed=7, clip=5.0, splits={"val": "shards/val", "test": "x"},
        optim=Optim(lr=0.001, kind="adamw", milestones=(40, 80), betas=(0.8, 0.9)),
    )  # fmt: skip


def test_words_that_yaml_parses_as_booleans_stay_words_where_the_type_allows_them(tmp_path: Path) -> None:
    assert load(tmp_path, "name: a\noptim:\n  log: off\n").optim.log == "off"
    assert load(tmp_path, "name: a\noptim:\n  log: off\n", "optim.log=on").optim.log == "on"
    with pytest.raises(ConfigError, match=r"optim\.kind = False: must be one of sgd, adamw"):
        load(tmp_path, "name: a\n", "optim.kind=off")


def test_the_last_override_wins_and_null_is_a_value(tmp_path: Path) -> None:
    assert load(tmp_path, "name: a\nclip: 3\n", "seed=1", "seed=2", "clip=null") == Run(name="a", seed=2)
    assert load(tmp_path, "name: a\noptim:\n", "optim.lr=2").optim.lr == 2.0, "an empty section has its defaults"


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("{}", [], r"name: must be set: of the run"),
        ("name: a\nsede: 3", [], r"sede: no such key; did you mean seed\?"),
        ("name: a\nxyz: 3", [], r"xyz: no such key; valid keys: name, seed"),
        ("name: a\noptim:\n  milestone: 3", [], r"optim\.milestone: no such key; did you mean optim\.milestones\?"),
        ("name: a", ["optim.ls=3"], r"optim\.ls: no such key"),
        ("name: 3", [], r"name = 3: expected string"),
        ("name: a\nseed: 1.5", [], r"seed = 1\.5: expected integer"),
        ("name: a\nseed: true", [], r"seed = True: expected integer"),
        ("name: a\ncompile: 1", [], r"compile = 1: expected true \| false"),
        ("name: a\nclip: x", [], r"clip = 'x': expected number \| null"),
        ("name: a\noptim: 3", [], r"optim: is a section"),
        ("name: a", ["optim.kind=sdg"], r"optim\.kind = 'sdg': must be one of sgd, adamw; did you mean sgd\?"),
        ("name: a", ["optim.milestones=40"], r"optim\.milestones = 40: must be a list"),
        ("name: a", ["optim.milestones=[1, x]"], r"optim\.milestones\[1\] = 'x': expected integer"),
        ("name: a", ["optim.betas=[1]"], r"optim\.betas = \[1\]: must have 2 entries"),
        ("name: a", ["splits=3"], r"splits = 3: must be a mapping"),
        ("name: a", ["seed"], r"seed: not of the form key=value"),
        ("name: a", ["name.x=3"], r"name\.x=3: name is a value, not a section"),
        ("- a", [], r"run\.yaml: must consist of `section:` lines"),
        ("a: [", [], r"run\.yaml: not YAML"),
        ("a: !!python/object/apply:os.system ['false']", [], r"run\.yaml: not YAML"),
    ],
)
def test_an_error_names_the_key_and_the_expected_value(
    tmp_path: Path, text: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text, *overrides)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        load_config(Run, tmp_path / "none.yaml")


runs = st.builds(
    Run,
    name=st.text(max_size=5),
    seed=st.integers(),
    compile=st.booleans(),
    clip=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    splits=st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
    optim=st.builds(
        Optim,
        lr=st.floats(allow_nan=False, allow_infinity=False),
        kind=st.sampled_from(["sgd", "adamw"]),
        milestones=st.lists(st.integers()).map(tuple),
        betas=st.tuples(*[st.floats(allow_nan=False, allow_infinity=False)] * 2),
    ),
)


@given(runs)
def test_a_config_survives_the_round_trip_through_yaml_and_plain_values(run: Run) -> None:
    assert build(Run, yaml.safe_load(to_yaml(run))) == run
    assert build(Run, to_tree(run)) == run


def test_the_comments_in_the_source_are_the_help_text() -> None:
    assert comments_of(Optim)["lr"] == "learning rate"
    text = describe(Run)
    for line in (
        "name: string (must be set)\n    of the run; there is no default",
        "clip: number | null = None",
        "# The optimizer.\noptim.lr: number = 0.1\n    learning rate",
        "optim.kind: sgd | adamw = 'sgd'",
        "optim.milestones: tuple of integer = []",
    ):
        assert line in text


@dataclass(frozen=True)
class Plain:
    """A kind without keys of its own."""

    name: Literal["plain"] = "plain"


@dataclass(frozen=True)
class Fancy:
    """A kind with a key, declared before a name that takes several lines of help."""

    strength: float = 1.0  # how fancy
    name: Literal["fancy"] = "fancy"  # a comment that is so long that the help text has to wrap it, to a second line


def styles() -> dict[str, type[Any]]:
    return {"plain": Plain, "fancy": Fancy}


@dataclass(frozen=True)
class Styled:
    """A config with a section whose name decides its keys."""

    style: Annotated[Any, OneOf(styles, "plain")]


def test_the_name_of_a_section_is_described_once_and_the_keys_of_each_kind_below_it() -> None:
    assert describe(Styled).strip().splitlines() == [
        "style.name: plain | fancy = 'plain'",
        "",
        "# style.name = plain: A kind without keys of its own.",
        "",
        "# style.name = fancy: A kind with a key, declared before a name that takes several lines of help.",
        "style.strength: number = 1.0",
        "    how fancy",
    ]


def test_every_key_of_the_data_section_is_documented() -> None:
    comments: dict[str, Any] = comments_of(DataSettings)
    assert set(comments) == set(DataSettings.__dataclass_fields__)
