"""Bad input ends in seconds: one clear message, no traceback, the right exit code on every rank, and nothing that is in
the way when the mistake is corrected."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from sopdist.cli import main
from sopdist.train.run_folder import LOCK
from tests.e2e.breaking import RUN, arguments, summary_of
from tests.e2e.by_hand import by_hand
from tests.e2e.launchers import run

CONFIG, DATA = 2, 1  # exit codes
BAD_KEYS = {
    "optim.lrr=1": "optim.lrr: no such key; did you mean optim.lr?",
    "optimm.lr=1": "optimm: no such key; did you mean optim?",
    "train.epochs": "train.epochs: not of the form key=value",
    "train.epochs=2.5": "train.epochs = 2.5: must be whole number",
    "optim.lr=fast": "optim.lr = 'fast': must be number",
    "optim.lr=nan": "optim.lr = nan: must be a number of at least 0",
    "engine.zero=1": "engine.zero = 1: needs engine.kind = deepspeed, which is auto",
    "engine.precision=fp16": "engine.precision = fp16: needs a GPU, and none was found; use bf16 or fp32",
    "engine.sync_batchnorm=true": "engine.sync_batchnorm: needs GPUs, and none was found; set it to false",
    "objective.alpha_u=3": "objective: alpha_u belongs to variant='paper'; variant='flow' takes visits",
    "objective.name=ce objective.consistency=1": "objective.name = 'ce': consistency and balance are terms of sop",
    "optim.milestones=[3]": "optim.milestones: belong to schedule multistep, not cosine",
    "evaluate.best=val": "evaluate.best = 'val': not one of evaluate.splits, which are test",
    "train.accumulate=65": "train.accumulate = 65: ",
    "data.threads=-1": "data.threads = -1: must be at least 0",
    "data.balanced_per_epoch=9": "data.balanced_per_epoch = 9: fewer than one sample for each of 10 classes",
    "model.name=nope": "model.name = 'nope': neither we nor timm have a network of that name",
    "model.weights=nope.pth": "model.weights = 'nope.pth': no such file",
    "run.name=a/b": "run.name = 'a/b': must be a plain name",
}
BAD_DATA = {
    "data.root=nowhere": "nowhere/train: no such folder",
    "data.root=. data.split=''": "manifest.json",
    "data.split=tran": "tran: no such folder",
    "data.labels=sym-0.5": "no label set 'sym-0.5'; there is: clean, given, sym-0.4-seed0",
    "data.root=without_shard": "without_shard/train: missing or of the wrong size: shard-000001.tar",
    "data.root=short_shard": "short_shard/train: missing or of the wrong size: shard-000000.tar",
    "data.labels=short data.root=short_labels": "label",
    "evaluate.splits.test=tset": "tset: no such folder",
    "evaluate.labels=nope": "no label set 'nope'; there is: clean, given",
    "run.folder=a_file": f"a_file/{RUN}: cannot be written: Not a directory; run.folder=... chooses another place",
    "--resume nowhere": "--resume nowhere: neither a checkpoint nor a run with one",
}
ONE_STEP = ("train.max_steps=1", "evaluate.splits={}")


@pytest.fixture(scope="module")
def place(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that is wrong in it."""
    folder = tmp_path_factory.mktemp("wrong")
    for name in ("without_shard", "short_shard", "short_labels", "eleven_classes"):
        shutil.copytree(digits, folder / name)
    (folder / "without_shard/train/shard-000001.tar").unlink()
    os.truncate(folder / "short_shard/train/shard-000000.tar", 100_000)
    for suffix in ("npy", "json"):  # a label set of another split
        there = folder / "short_labels/test/labels" / f"given.{suffix}"
        shutil.copy(there, folder / "short_labels/train/labels" / f"short.{suffix}")
    (folder / "a_file").write_text("in the way")
    return folder


def expected(said: str, message: str) -> None:
    """The message, once, and nothing but messages."""
    lines = [line for line in said.splitlines() if line.startswith("sopdist: ")]
    assert len(lines) == 1, said
    assert message in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("mistake", "code", "message"),
    [(text, CONFIG, message) for text, message in BAD_KEYS.items()]
    + [(text, DATA, message) for text, message in BAD_DATA.items()],
)
def test_a_mistake_is_told_in_one_message(
    digits: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    mistake: str, code: int, message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(place)
    assert main(["train", *arguments(digits, tmp_path, *mistake.split(" "), kind="auto")]) == code
    expected(capsys.readouterr().err, message)
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left <= {"config.yaml", LOCK}, "what else is there would look like a run"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "data.root: must be set: "),
        (b"a: [1, 2\nb: {", "c.yaml: not YAML: "),
        (b"\xff\xfe\0", "c.yaml: not YAML: "),
        (b"- 1\n- 2\n", "c.yaml: must consist of `section:` lines, found list"),
        (None, "c.yaml: no such file, and no such name in configs/; there is cifar10, "),
    ],
)
def test_a_config_file_that_is_none_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str
) -> None:
    path = tmp_path / "c.yaml"
    if content is not None:
        path.write_bytes(content)
    assert main(["train", "--cfg", str(path)]) == CONFIG
    expected(capsys.readouterr().err, message)


def test_an_evaluation_split_with_another_number_of_classes_is_refused(
    digits: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = place / "eleven_classes/test/manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"classes": [*manifest["classes"], "eleven"]}))
    split = f"evaluate.splits.test={place}/eleven_classes/test"
    assert main(["train", *arguments(digits, tmp_path, split, kind="auto")]) == CONFIG
    expected(capsys.readouterr().err, "evaluate.splits.test: has 11 classes, the training split 10")


def test_after_all_mistakes_the_same_command_works_once_and_then_asks(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", *arguments(digits, tmp_path, *ONE_STEP, kind="auto")]
    for mistake in ("data.root=nowhere", "data.labels=nope", "evaluate.splits.test=nope", "model.name=nope"):
        assert main([*command, mistake]) != 0
    assert main(command) == 0
    assert summary_of(tmp_path)["finished"] is True
    capsys.readouterr()
    assert main(command) == DATA
    expected(capsys.readouterr().err, f"{RUN} holds a run already: --resume auto goes on with it")
    assert summary_of(tmp_path)["finished"] is True, "it was not touched"


def test_two_ranks_leave_together_and_rank_0_speaks(digits: Path, place: Path, tmp_path: Path) -> None:
    """Mistakes that all ranks find at once, that only rank 0 finds, that only rank 1 finds, that come with the data."""
    assert main(["train", *arguments(digits, tmp_path / "before", *ONE_STEP, kind="auto")]) == 0
    shutil.copy(tmp_path / "before" / RUN / "network-last.safetensors", tmp_path / "here.safetensors")
    mistakes = {
        "optim.lrr=1": (CONFIG, BAD_KEYS["optim.lrr=1"]),
        "train.batch=1": (CONFIG, "train.batch = 1: no sample a step for some of 2 ranks; raise it to 2 or more"),
        "train.accumulate=33": (CONFIG, "train.accumulate = 33: some of 2 ranks have 32 samples of a step"),
        "engine.kind=single": (CONFIG, "engine.kind = single, but 2 ranks were started"),
        "engine.sync_batchnorm=true": (CONFIG, BAD_KEYS["engine.sync_batchnorm=true"]),
        "model.name=nope": (CONFIG, BAD_KEYS["model.name=nope"]),
        "model.weights=here.safetensors": (CONFIG, "rank 1: model.weights = 'here.safetensors': no such file"),
        "data.root=nowhere": (DATA, "nowhere/train: no such folder"),
        f"data.root={place}/without_shard": (DATA, "shard-000001.tar"),
        f"data.root={place}/short_labels data.labels=short": (DATA, "label"),
        f"run.folder={place}/a_file": (DATA, "cannot be written: Not a directory"),
        "--resume nowhere": (DATA, "neither a checkpoint nor a run with one"),
    }
    cases = [arguments(digits, tmp_path, *mistake.split(" ")) for mistake in mistakes]
    right = arguments(digits, tmp_path, *ONE_STEP)
    *ended, first, second = by_hand(tmp_path, [*cases, right, right], apart=True)
    for (mistake, (code, message)), ((code0, said0), (code1, said1)) in zip(mistakes.items(), ended, strict=True):
        assert (code0, code1) == (code, code), mistake
        expected(said0, message)
        assert said1 == "", mistake
    assert [code for code, _ in first] == [0, 0], "corrected, it works"
    assert [code for code, _ in second] == [DATA, DATA]


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "kind"), [("torchrun", "ddp"), ("deepspeed", "deepspeed")])
def test_a_launcher_ends_with_the_mistake_and_without_ours_of_a_traceback(
    digits: Path, tmp_path: Path, launcher: str, kind: str
) -> None:
    ended = run(launcher, arguments(digits, tmp_path, "data.labels=nope", kind=kind), tmp_path, timeout=150)
    assert ended.code != 0
    assert ended.err.count("no label set 'nope'") == 1, ended.told
    assert "sopdist/" not in ended.err.replace(str(digits), "").replace(str(tmp_path), ""), ended.told


@pytest.mark.long
def test_bogus_settings_of_wandb_do_not_stop_a_run_and_its_key_is_nowhere(digits: Path, tmp_path: Path) -> None:
    key = "0123456789abcdef" * 2 + "01234567"
    environ = {"WANDB_API_KEY": key, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_MODE": "online"}
    given = arguments(digits, tmp_path, "log.wandb=auto", "log.wandb_timeout=5", *ONE_STEP)
    ended = run("torchrun", given, tmp_path, environ=environ)
    assert ended.code == 0, ended.told
    assert summary_of(tmp_path)["finished"] is True
    assert key not in ended.out + ended.err
    files = [path for path in (tmp_path / RUN).rglob("*") if path.is_file()]
    assert not [path for path in files if key.encode() in path.read_bytes()]
