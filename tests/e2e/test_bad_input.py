"""Bad input ends a run in seconds: one clear message, no traceback, the right exit code on every rank, and no files
that prevent the corrected command from running."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from sopdist.cli import main
from sopdist.train.record.run_folder import LOCK
from tests.support.breaking import RUN, arguments, summary_of
from tests.support.launchers import run
from tests.support.without_launcher import run_without_launcher

CONFIG, DATA = 2, 1  # exit codes
BAD_KEYS = {
    "optim.lrr=1": "optim.lrr: no such key; did you mean optim.lr?",
    "optimm.lr=1": "optimm: no such key; did you mean optim?",
    "train.epochs": "train.epochs: not of the form key=value",
    "train.epochs=2.5": "train.epochs = 2.5: expected integer",
    "optim.lr=fast": "optim.lr = 'fast': expected number",
    "optim.lr=nan": "optim.lr = nan: must be finite and at least 0",
    "engine.zero=1": "engine.zero = 1: needs engine.kind = deepspeed, but it is auto",
    "engine.precision=fp16": "engine.precision = fp16: needs a GPU, and none was found; use bf16 or fp32",
    "engine.sync_batchnorm=true": "engine.sync_batchnorm: needs GPUs, and none was found; set it to false",
    "method.alpha_u=3": "method: alpha_u belongs to variant='paper'; variant='flow' takes visits",
    "method.name=ce method.consistency=1": "method.consistency: belongs to method.name = sop or cores2_star, not to ce",
    "optim.milestones=[3]": "optim.milestones: needs optim.schedule = multistep, but it is cosine",
    "evaluate.best=val": "evaluate.best = 'val': not one of evaluate.splits, which are test",
    "train.accumulate=65": "train.accumulate = 65: ",
    "data.threads=-1": "data.threads = -1: must be at least 0",
    "data.balanced_per_epoch=9": "data.balanced_per_epoch = 9: fewer than one sample for each of 10 classes",
    "model.name=nope": "model.name = 'nope': no built-in or timm model has this name",
    "model.weights=nope.pth": "model.weights = 'nope.pth': no such file",
    "run.name=a/b": "run.name = 'a/b': must be a plain name",
}
BAD_DATA = {
    "data.root=nowhere": "nowhere/train: no such folder",
    "data.root=. data.split=''": "manifest.json",
    "data.split=tran": "tran: no such folder",
    "data.labels=sym-0.5": "no label set 'sym-0.5'; available: clean, given, sym-0.4-seed0",
    "data.root=without_shard": "without_shard/train: missing or of the wrong size: shard-000001.tar",
    "data.root=short_shard": "short_shard/train: missing or of the wrong size: shard-000000.tar",
    "data.labels=short data.root=short_labels": "label",
    "evaluate.splits.test=tset": "tset: no such folder",
    "evaluate.labels=nope": "no label set 'nope'; available: clean, given",
    "run.folder=a_file": f"a_file/{RUN}: cannot be written: Not a directory; choose another folder with run.folder=...",
    "--resume nowhere": "--resume nowhere: not a checkpoint, and not a run that has one",
}
ONE_STEP = ("train.max_steps=1", "evaluate.splits={}")


@pytest.fixture(scope="module")
def bad_data(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all kinds of bad data."""
    folder = tmp_path_factory.mktemp("bad_data")
    for name in ("without_shard", "short_shard", "short_labels", "eleven_classes"):
        shutil.copytree(digits, folder / name)
    (folder / "without_shard/train/shard-000001.tar").unlink()
    os.truncate(folder / "short_shard/train/shard-000000.tar", 100_000)
    for suffix in ("npy", "json"):  # a label set of another split
        source = folder / "short_labels/test/labels" / f"given.{suffix}"
        shutil.copy(source, folder / "short_labels/train/labels" / f"short.{suffix}")
    (folder / "a_file").write_text("in the way")
    return folder


def assert_one_message(stderr: str, message: str) -> None:
    """The message is printed once, without a traceback."""
    lines = [line for line in stderr.splitlines() if line.startswith("sopdist: ")]
    assert len(lines) == 1, stderr
    assert message in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("mistake", "code", "message"),
    [(text, CONFIG, message) for text, message in BAD_KEYS.items()]
    + [(text, DATA, message) for text, message in BAD_DATA.items()],
)
def test_a_mistake_is_reported_in_one_message(
    digits: Path, bad_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    mistake: str, code: int, message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(bad_data)
    assert main(["train", *arguments(digits, tmp_path, *mistake.split(" "), kind="auto")]) == code
    assert_one_message(capsys.readouterr().err, message)
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left <= {"config.yaml", LOCK}, "other files would look like a run"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "data.root: must be set: "),
        (b"a: [1, 2\nb: {", "c.yaml: not YAML: "),
        (b"\xff\xfe\0", "c.yaml: not YAML: "),
        (b"- 1\n- 2\n", "c.yaml: must consist of `section:` lines, found list"),
        (None, "c.yaml: no such file, and no such name in configs/, which has cifar10, "),
    ],
)
def test_an_invalid_config_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str
) -> None:
    path = tmp_path / "c.yaml"
    if content is not None:
        path.write_bytes(content)
    assert main(["train", "--cfg", str(path)]) == CONFIG
    assert_one_message(capsys.readouterr().err, message)


def test_an_evaluation_split_with_another_number_of_classes_is_refused(
    digits: Path, bad_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = bad_data / "eleven_classes/test/manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"classes": [*manifest["classes"], "eleven"]}))
    split = f"evaluate.splits.test={bad_data}/eleven_classes/test"
    assert main(["train", *arguments(digits, tmp_path, split, kind="auto")]) == CONFIG
    assert_one_message(capsys.readouterr().err, "evaluate.splits.test: has 11 classes, but the training split has 10")


def test_a_corrected_command_works_and_is_refused_the_second_time(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", *arguments(digits, tmp_path, *ONE_STEP, kind="auto")]
    for mistake in ("data.root=nowhere", "data.labels=nope", "evaluate.splits.test=nope", "model.name=nope"):
        assert main([*command, mistake]) != 0
    assert main(command) == 0
    assert summary_of(tmp_path)["finished"] is True
    capsys.readouterr()
    assert main(command) == DATA
    assert_one_message(capsys.readouterr().err, f"{RUN} already contains a run: resume it with --resume auto")
    assert summary_of(tmp_path)["finished"] is True, "it is unchanged"


def test_two_ranks_exit_with_the_same_code_and_rank_0_reports(digits: Path, bad_data: Path, tmp_path: Path) -> None:
    """Mistakes that all ranks find, that only rank 0 finds, that only rank 1 finds, and mistakes in the data."""
    assert main(["train", *arguments(digits, tmp_path / "before", *ONE_STEP, kind="auto")]) == 0
    shutil.copy(tmp_path / "before" / RUN / "network-last.safetensors", tmp_path / "here.safetensors")
    mistakes = {
        "optim.lrr=1": (CONFIG, BAD_KEYS["optim.lrr=1"]),
        "train.batch=1": (
            CONFIG,
            "train.batch = 1: less than one sample per step for some of 2 ranks; raise it to 2 or more",
        ),
        "train.accumulate=33": (CONFIG, "train.accumulate = 33: some of 2 ranks have 32 samples per step"),
        "engine.kind=single": (CONFIG, "engine.kind = single, but 2 ranks were started"),
        "engine.sync_batchnorm=true": (CONFIG, BAD_KEYS["engine.sync_batchnorm=true"]),
        "model.name=nope": (CONFIG, BAD_KEYS["model.name=nope"]),
        "model.weights=here.safetensors": (CONFIG, "rank 1: model.weights = 'here.safetensors': no such file"),
        "data.root=nowhere": (DATA, "nowhere/train: no such folder"),
        f"data.root={bad_data}/without_shard": (DATA, "shard-000001.tar"),
        f"data.root={bad_data}/short_labels data.labels=short": (DATA, "label"),
        f"run.folder={bad_data}/a_file": (DATA, "cannot be written: Not a directory"),
        "--resume nowhere": (DATA, "not a checkpoint, and not a run that has one"),
    }
    cases = [arguments(digits, tmp_path, *mistake.split(" ")) for mistake in mistakes]
    correct = arguments(digits, tmp_path, *ONE_STEP)
    *ended, first, second = run_without_launcher(tmp_path, [*cases, correct, correct], apart=True)
    for (mistake, (code, message)), ((code0, stderr0), (code1, stderr1)) in zip(mistakes.items(), ended, strict=True):
        assert (code0, code1) == (code, code), mistake
        assert_one_message(stderr0, message)
        assert stderr1 == "", mistake
    assert [code for code, _ in first] == [0, 0], "corrected, it works"
    assert [code for code, _ in second] == [DATA, DATA]


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "kind"), [("torchrun", "ddp"), ("deepspeed", "deepspeed")])
def test_a_launcher_prints_the_message_and_no_traceback_of_sopdist(
    digits: Path, tmp_path: Path, launcher: str, kind: str
) -> None:
    ended = run(launcher, arguments(digits, tmp_path, "data.labels=nope", kind=kind), tmp_path, timeout=150)
    assert ended.code != 0
    assert ended.err.count("no label set 'nope'") == 1, ended.output
    assert "sopdist/" not in ended.err.replace(str(digits), "").replace(str(tmp_path), ""), ended.output


@pytest.mark.long
def test_bad_wandb_settings_do_not_stop_a_run_and_its_api_key_is_not_written(digits: Path, tmp_path: Path) -> None:
    key = "0123456789abcdef" * 2 + "01234567"
    environ = {"WANDB_API_KEY": key, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_MODE": "online"}
    given = arguments(digits, tmp_path, "log.wandb=auto", "log.wandb_timeout=5", *ONE_STEP)
    ended = run("torchrun", given, tmp_path, environ=environ)
    assert ended.code == 0, ended.output
    assert summary_of(tmp_path)["finished"] is True
    assert key not in ended.out + ended.err
    files = [path for path in (tmp_path / RUN).rglob("*") if path.is_file()]
    assert not [path for path in files if key.encode() in path.read_bytes()]
