"""`sopdist checkpoint ...` on the checkpoints of a trained run."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file, save_file

from sopdist import SOP
from sopdist.checkpoint import open_checkpoint
from sopdist.data.labels import read_labels, write_labels
from sopdist.data.manifest import read_manifest
from sopdist.models import load_exported
from sopdist.train.run import run_config
from tests.support.grey_images import CLASSES, pixels_of
from tests.support.records import lines_of
from tests.support.small_run import SAMPLES, Sopdist, step

torch.set_num_threads(1)


def as_format_1(folder: Path) -> None:
    """Rewrite a checkpoint in format 1, with one file per kind of state."""
    saved = open_checkpoint(folder)
    network, optimizer, noise = saved.network(), saved.section("optimizer/"), saved.table("noise")
    shutil.rmtree(folder)
    folder.mkdir()
    save_file(network, folder / "network.safetensors")
    save_file(optimizer, folder / "optimizer.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in noise.items()}, folder / "noise-0-of-1.safetensors")
    state = {"format": 1, "sopdist": "0.1.0", "torch": "2.13.0", "step": saved.step, "best": saved.best, "ranks": 1}
    (folder / "state.json").write_text(json.dumps({**state, "fingerprint": saved.fingerprint}))


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_list_shows_every_checkpoint_of_a_run_newest_last(sopdist: Sopdist, workspace: Path) -> None:
    lines = sopdist("list", "runs/whole").splitlines()
    assert lines[0].split() == ["step", "epoch", "when", "size", "ranks", "engine", "best", "format"]
    assert [line.split()[:2] for line in lines[2:]] == [["7", "1.00"], ["14", "2.00"], ["21", "3.00"]]
    entries = json.loads(sopdist("list", "runs/whole", "--json"))
    assert [entry["step"] for entry in entries] == [7, 14, 21]
    bests = [line["best"] for line in lines_of(workspace / "runs" / "whole", "eval")]
    for entry, best in zip(entries, bests, strict=True):
        files = [path for path in (workspace / entry["folder"]).iterdir() if path.suffix == ".safetensors"]
        assert entry["bytes"] == sum(path.stat().st_size for path in files)
        about = (entry["state"], entry["ranks"], entry["engine"], entry["format"], entry["best"])
        assert about == ("complete", 1, "single", 3, best)


def test_list_distinguishes_damaged_incomplete_and_old_checkpoints(sopdist: Sopdist, run_copy: Path) -> None:
    as_format_1(step(run_copy, 7))
    flip_a_bit(step(run_copy, 14) / "checkpoint.json")
    shutil.copytree(step(run_copy, 21), step(run_copy, 28))
    (step(run_copy, 28) / "complete").unlink()
    step(run_copy, 28).with_suffix(".partial").mkdir()
    step(run_copy, 35).with_suffix(".damaged").mkdir()
    (run_copy / "checkpoints" / "notes").mkdir()
    entries = json.loads(sopdist("list", run_copy, "--json"))
    found = [(entry["step"], entry["state"]) for entry in entries]
    incomplete = [(28, "incomplete"), (28, "incomplete")]
    assert found == [(7, "complete"), (14, "damaged"), (21, "complete"), *incomplete, (35, "damaged")]
    assert entries[0]["format"] == 1
    assert f"{step(run_copy, 14) / 'checkpoint.json'}: is damaged" in entries[1]["reason"]
    output = sopdist("list", run_copy)
    assert "DAMAGED: " in output
    assert "INCOMPLETE: its save was interrupted or is in progress" in output


def test_list_is_empty_for_a_run_without_checkpoints_and_an_error_for_other_folders(
    sopdist: Sopdist, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text("")
    assert sopdist("list", tmp_path) == f"{tmp_path}: has no checkpoints\n"
    assert json.loads(sopdist("list", tmp_path, "--json")) == []
    (tmp_path / "config.yaml").unlink()
    assert f"{tmp_path}: is not a run" in sopdist("list", tmp_path, code=1)
    assert "nowhere: no such folder" in sopdist("list", "nowhere", code=1)


def test_show_counts_the_tensors_of_a_checkpoint(sopdist: Sopdist, workspace: Path) -> None:
    about = json.loads(sopdist("show", "runs/whole", "--json", "--tensors"))
    assert (about["step"], about["epoch"], about["ranks"], about["format"]) == (21, 3.0, 1, 3)
    assert about["folder"] == "runs/whole/checkpoints/step-00000021"
    last = load_file(workspace / "runs" / "whole" / "network-last.safetensors")
    weights = {name: tensor for name, tensor in last.items() if not name.endswith(("mean", "var", "tracked"))}
    assert about["parameters"] == sum(tensor.numel() for tensor in weights.values())
    kinds = about["tensors"]
    assert kinds["network"]["tensors"] + kinds["statistics"]["tensors"] == len(last)
    assert kinds["optimizer"]["numbers"] == about["parameters"]  # momentum
    assert kinds["tables"]["bytes"] == sum(
        info["bytes"] for name, info in about["tensor_list"].items() if name.startswith("tables/noise/")
    )
    assert about["tensor_list"]["tables/noise/0/u"] == {"dtype": "float32", "shape": [61], "bytes": 244, "fragments": 1}
    assert about["fingerprint"]["samples"] == SAMPLES
    noise = lines_of(workspace / "runs" / "whole", "noise")[-1]
    assert about["noise"] | {"flagged": 0} == {
        "layout": "slots", "slots": 7, "samples": SAMPLES, "classes": 7, "visited": SAMPLES, "flagged": 0,
        "active": noise["active_rows"], "estimated_rate": pytest.approx(noise["rate"]), "evictions": 0,
        "largest_evicted": 0.0, "onset": 0, "provisional": bool(noise["provisional"]),
        "rate_interval": [pytest.approx(noise["rate_low"]), pytest.approx(noise["rate_high"])],
    }  # fmt: skip


def test_show_prints_a_readable_summary(sopdist: Sopdist) -> None:
    output = sopdist("show", "runs/whole/checkpoints/step-00000007", "--tensors")
    assert output.startswith("runs/whole/checkpoints/step-00000007\n  step 7, epoch 1.00, written 20")
    assert "by 1 rank, single;" in output
    assert "noise table: slots (7 per sample), 7 classes, 61 of 61 samples visited" in output
    assert "method.variant: flow" in output
    assert "tables/noise/0/v_class" not in output
    assert "  tables/noise/0/classes" in output


def test_verify_reads_every_byte(sopdist: Sopdist, run_copy: Path) -> None:
    assert sopdist("verify", run_copy).count(": intact, ") == 3
    damaged = step(run_copy, 14) / "rank-0-of-1.safetensors"
    flip_a_bit(damaged)
    lines = sopdist("verify", run_copy, code=1).splitlines()
    assert [line.startswith("DAMAGED") for line in lines] == [False, True, False]
    assert f"DAMAGED {damaged}: is damaged" in lines[1]
    assert f"{damaged}: is damaged" in sopdist("verify", damaged.parent, code=1)
    assert "intact" in sopdist("verify", step(run_copy, 21))


@pytest.mark.parametrize("name", ["rank-0-of-1.safetensors", "checkpoint.json", "complete"])
@pytest.mark.parametrize("harm", ["shorter", "missing"])
def test_verify_names_the_damaged_or_missing_file(sopdist: Sopdist, run_copy: Path, name: str, harm: str) -> None:
    path = step(run_copy, 21) / name
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-3])
    output = sopdist("verify", step(run_copy, 21), code=1)
    assert output.startswith("DAMAGED ")
    assert str(path) in output or "checkpoint.json: is damaged: its checksum does not match complete" in output


def test_verify_says_that_format_1_has_no_checksums(sopdist: Sopdist, run_copy: Path) -> None:
    as_format_1(step(run_copy, 7))
    assert "format 1 has no checksums" in sopdist("verify", step(run_copy, 7))


@pytest.mark.parametrize("command", ["show", "verify", "export", "reshard"])
def test_a_path_that_is_not_a_checkpoint_is_refused_by_name(sopdist: Sopdist, tmp_path: Path, command: str) -> None:
    more = {"export": ["--out", tmp_path / "out"], "reshard": ["--out", tmp_path / "out", "--ranks", 2]}.get(
        command, []
    )
    assert "nowhere: no such folder" in sopdist(command, "nowhere", *more, code=1)
    output = sopdist(command, "shards", *more, code=1)
    assert "shards: is not a checkpoint, and not a run that has one" in output
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    assert "empty: has no complete checkpoint" in sopdist(command, tmp_path / "empty", *more, code=1)
    assert not (tmp_path / "out").exists()


def evaluation_images() -> torch.Tensor:
    """Images preprocessed as in the recipe, computed manually."""
    pixels = np.stack([pixels_of(index) for index in range(5)])[:, None] / 255  # (5, 1, 8, 8)
    return torch.from_numpy(((pixels - 0.3053) / 0.3759).astype(np.float32))


def test_an_exported_network_predicts_as_the_network_of_the_run(
    sopdist: Sopdist, workspace: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    output = sopdist("export", "runs/whole", "--out", out, "--what", "network,onnx")
    assert [line.split()[0] for line in output.splitlines()] == [
        str(out / name) for name in ("model.safetensors", "config.json", "model.onnx")
    ]
    weights, last = (
        load_file(out / "model.safetensors"),
        load_file(workspace / "runs" / "whole" / "network-last.safetensors"),
    )
    assert weights.keys() == last.keys()
    assert all(torch.equal(weights[name], last[name]) for name in last)
    images = evaluation_images()
    with torch.inference_mode():
        logits = load_exported(out)(images).numpy()
    (found,) = onnxruntime.InferenceSession(out / "model.onnx").run(None, {"images": images.numpy()})
    assert np.abs(found - logits).max() < 1e-5
    config = json.loads((out / "config.json").read_text())
    assert config["label_names"] == list(CLASSES)
    assert (config["sopdist"]["step"], config["sopdist"]["epoch"]) == (21, 3.0)


def test_export_best_uses_the_best_network(sopdist: Sopdist, workspace: Path, run_copy: Path, tmp_path: Path) -> None:
    best = open_checkpoint(step(run_copy, 21)).index.about["best_step"]
    assert best in (7, 14, 21)
    sopdist("export", run_copy, "--best", "--out", tmp_path / "best")
    found = load_file(tmp_path / "best" / "model.safetensors")
    wanted = load_file(workspace / "runs" / "whole" / "network-best.safetensors")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert json.loads((tmp_path / "best" / "config.json").read_text())["sopdist"]["step"] == best
    as_format_1(step(run_copy, 21))
    assert "has no best network" in sopdist("export", run_copy, "--best", "--out", tmp_path / "none", code=1)


def test_an_exported_noise_table_has_the_labels_used_in_training(
    sopdist: Sopdist, workspace: Path, tmp_path: Path
) -> None:
    sopdist("export", "runs/whole", "--out", tmp_path / "out", "--what", "noise", "--top", 2)
    table = parquet.read_table(tmp_path / "out" / "noise.parquet")
    folder = workspace / "shards" / "train"
    labels = read_labels(folder, read_manifest(folder), "wrong").labels
    assert table["label"].to_pylist() == labels.tolist()
    sop = SOP(SAMPLES, len(CLASSES), layout="dense", seed=0)
    sop.table.load_state_dict(open_checkpoint(step(workspace / "runs" / "whole", 21)).table("noise"))
    given = torch.from_numpy(labels.astype(np.int64))
    assert table["flagged"].to_pylist() == sop.flags(given).tolist()
    assert table["proposed"].to_pylist() == sop.proposed_labels(given).tolist()
    assert table["score"].to_pylist() == sop.noise_scores().tolist()
    assert max(len(row) for row in table["v_class"].to_pylist()) == 2
    about = json.loads(table.schema.metadata[b"sopdist"])
    assert (about["step"], about["label_set"], about["label_names"]) == (21, "wrong", list(CLASSES))


def test_without_the_data_labels_are_omitted_with_a_message(
    sopdist: Sopdist, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ("export", workspace / "runs" / "whole", "--what", "network,noise")
    output = sopdist(*arguments, "--out", "out")
    assert "class names, labels and proposed labels are omitted: shards/train" in output
    assert "label" not in parquet.read_table("out/noise.parquet").column_names
    assert "label_names" not in json.loads(Path("out/config.json").read_text())
    output = sopdist(*arguments, "--out", "named", "--data", workspace / "shards" / "train")
    assert "omitted" not in output
    assert json.loads(Path("named/config.json").read_text())["label_names"] == list(CLASSES)
    output = sopdist(*arguments, "--out", "other", "--data", workspace / "shards" / "val", code=1)
    reason = "it has samples = 30, the checkpoint has 61"
    assert f"is not the split that the checkpoint was trained on: {reason}" in output
    assert not Path("other").exists()


def test_labels_that_have_changed_since_training_are_refused_unless_named(
    sopdist: Sopdist, workspace: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(workspace / "shards" / "train", tmp_path / "train")
    changed = np.arange(SAMPLES) % 5
    write_labels(folder, read_manifest(folder), "wrong", changed, {"kind": "test"})
    arguments = ("export", "runs/whole", "--what", "noise", "--data", folder, "--out", tmp_path / "out")
    assert "the label set 'wrong' has changed since training" in sopdist(*arguments, code=1)
    sopdist(*arguments, "--labels", "wrong")
    assert parquet.read_table(tmp_path / "out" / "noise.parquet")["label"].to_pylist() == changed.tolist()


def test_export_overwrites_only_with_force(sopdist: Sopdist, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sopdist("export", step(Path("runs/whole"), 7), "--out", out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    output = sopdist("export", "runs/whole", "--out", out, code=1)
    assert f"--out {out}: is not empty; --force replaces files of the same names" in output
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    sopdist("export", "runs/whole", "--out", out, "--force")
    assert json.loads((out / "config.json").read_text())["sopdist"]["step"] == 21
    (tmp_path / "file").write_text("")
    assert "file: is a file; name a folder" in sopdist("export", "runs/whole", "--out", tmp_path / "file", code=1)


def test_export_of_a_damaged_checkpoint_is_refused(sopdist: Sopdist, run_copy: Path, tmp_path: Path) -> None:
    flip_a_bit(step(run_copy, 21) / "rank-0-of-1.safetensors")
    output = sopdist("export", run_copy, "--out", tmp_path / "out", code=1)
    assert f"{step(run_copy, 21) / 'rank-0-of-1.safetensors'}: is damaged" in output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("what", "package"), [("onnx", "onnxscript"), ("noise", "pyarrow")])
def test_missing_packages_are_reported_before_any_work(
    sopdist: Sopdist, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    output = sopdist("export", "runs/whole", "--out", tmp_path / "out", "--what", what, code=1)
    assert f"--what {what}: needs {package}" in output
    assert "pip install 'sopdist[export]'" in output
    assert not (tmp_path / "out").exists()
    sopdist("export", "runs/whole", "--out", tmp_path / "out")  # the network needs no extra packages


def test_an_unknown_word_for_what_lists_the_valid_ones(sopdist: Sopdist, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sopdist("export", "runs/whole", "--out", "x", "--what", "network,onx")
    assert "'onx' cannot be exported; must be one of network, onnx, noise" in capsys.readouterr().err


def test_a_checkpoint_without_a_noise_table_says_so(sopdist: Sopdist, tmp_path: Path) -> None:
    keys = ["run.name=ce", "method={name: ce}", "train.max_steps=2"]
    assert run_config("small.yaml", keys) == 0
    output = sopdist("export", "runs/ce", "--out", tmp_path / "out", "--what", "noise", code=1)
    assert "has no noise table to export" in output
    assert "noise" not in json.loads(sopdist("show", "runs/ce", "--json"))
    sopdist("reshard", "runs/ce", "--ranks", 2, "--out", tmp_path / "resharded")
    assert "noise" not in open_checkpoint(tmp_path / "resharded").table_names


def test_a_checkpoint_of_format_1_is_exported_with_the_config_of_its_run(
    sopdist: Sopdist, run_copy: Path, tmp_path: Path
) -> None:
    sopdist("export", run_copy, "--out", tmp_path / "new")
    as_format_1(step(run_copy, 21))
    sopdist("export", run_copy, "--out", tmp_path / "old", "--what", "network,noise")
    new, old = (load_file(tmp_path / name / "model.safetensors") for name in ("new", "old"))
    assert all(torch.equal(new[name], old[name]) for name in new)
    (run_copy / "config.yaml").unlink()
    output = sopdist("export", run_copy, "--out", tmp_path / "lost", code=1)
    assert "export it from inside its run" in output
