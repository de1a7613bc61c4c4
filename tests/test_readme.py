"""The README's examples and its commands on digits run as printed; commands and links in the docs exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sopdist.cli import COMMANDS, main
from sopdist.train.config import CONFIGS, load
from sopdist.train.distributed.launch_env import LAUNCH_VARIABLES
from tests.support.launching import BIN, REPOSITORY, free_port, kill_group
from tests.support.ranks import run_on_ranks

ROOT = Path(__file__).parent.parent
DOCS = sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))
PAGES = ["README.md", *DOCS, "CONTRIBUTING.md"]
TIMEOUT = 180.0  # seconds per command


class Clusters(torch.utils.data.Dataset[tuple[Tensor, int, int]]):
    """Ten well separated clusters, 30% of the labels resampled."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.clean = torch.randint(10, (600,), generator=generator)
        centres = torch.randn(10, 20, generator=generator) * 3
        self.points = centres[self.clean] + torch.randn(600, 20, generator=generator)
        resampled = torch.rand(600, generator=generator) < 0.3
        self.labels = torch.where(resampled, torch.randint(10, (600,), generator=generator), self.clean)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, int, int]:
        return self.points[i], int(self.labels[i]), i


def python_examples() -> list[str]:
    """The Python examples of the README: your own loop, the same with DDP, and from shards."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def commands(first: str) -> list[list[str]]:
    """The commands of the README's block that starts with `first`."""
    text = (ROOT / "README.md").read_text()
    (block,) = re.findall(rf"```\n({re.escape(first)}.*?)```", text, re.DOTALL)
    return [shlex.split(line, comments=True) for line in block.splitlines()]


def test_the_commands_and_the_example_for_shards_run_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in commands(".venv/bin/sopdist prepare digits"):
        assert main(command[1:]) == 0, command
    assert (tmp_path / "digits.png").exists()
    capsys.readouterr()
    torch.manual_seed(0)
    _, _, example = python_examples()
    exec(example, {})
    found = re.search(r"(\d+)% of the 100 most suspicious labels are wrong", capsys.readouterr().out)
    assert found is not None
    assert int(found[1]) >= 95


def test_the_five_line_example_runs_as_printed_and_finds_wrong_labels() -> None:
    example, _, _ = python_examples()
    names = example_names()
    dataset = names["dataset"]
    exec(example, names)
    sop, wrong = names["sop"], dataset.labels != dataset.clean
    assert float(wrong[sop.suspects(100)].float().mean()) > 0.95
    assert float((sop.proposed_labels(dataset.labels) == dataset.clean).float().mean()) > 0.95
    assert abs(sop.noise_rate() - float(wrong.float().mean())) < 0.05


def test_the_ddp_example_runs_as_printed_on_two_ranks_and_finds_wrong_labels(tmp_path: Path) -> None:
    _, example, _ = python_examples()
    run_on_ranks([partial(run_ddp_example, example)], 2, tmp_path)


def run_ddp_example(example: str, _: dist.ProcessGroup) -> None:
    """Run the example on one rank and check its results."""
    from sopdist import SOP

    names = example_names()
    dataset, model = names["dataset"], nn.parallel.DistributedDataParallel(names["model"])
    sampler = torch.utils.data.DistributedSampler[tuple[Tensor, int, int]](dataset)
    names |= {"SOP": SOP, "torch": torch, "sampler": sampler, "ddp_model": model}
    names["loader"] = torch.utils.data.DataLoader(dataset, batch_size=25, sampler=sampler)
    exec(example, names)
    sop, wrong = names["sop"], dataset.labels != dataset.clean
    assert len(sop.table) == 300  # half of the rows
    assert float(wrong[names["suspects"]].float().mean()) > 0.95
    assert float((sop.proposed_labels(dataset.labels) == dataset.clean).float().mean()) > 0.95


def example_names() -> dict[str, Any]:
    """The names that the examples expect to exist."""
    torch.manual_seed(0)
    dataset = Clusters()
    model = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 10))
    return {
        "dataset": dataset,
        "all_labels": dataset.labels,
        "epochs": 12,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        "loader": torch.utils.data.DataLoader(dataset, batch_size=50, shuffle=True),
    }


@pytest.mark.long
def test_the_training_commands_run_as_printed_for_a_few_steps(tmp_path: Path) -> None:
    for name in (".venv", "launch", "configs"):
        (tmp_path / name).symlink_to(BIN.parent if name == ".venv" else REPOSITORY / name)
    stopping = commands("timeout 20 .venv/bin/sopdist train")
    assert stopping[0][:2] == ["timeout", "20"]
    stopping[0] = stopping[0][2:]  # the steps are limited instead
    prepared = commands(".venv/bin/sopdist prepare digits")[:2]
    for command in (*prepared, *commands(".venv/bin/deepspeed"), *stopping):
        ended = run_as_printed(command, tmp_path)
        assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    names = ["demo", "demo-alone", "demo-ddp", "demo-stops"]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == names
    assert {path.name for path in (tmp_path / "exported").iterdir()} >= {"model.safetensors", "noise.parquet"}


def run_as_printed(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, on its own port because tests run in parallel; limit training to a few steps."""
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    environ |= {"MASTER_PORT": str(free_port()), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    port = {"deepspeed": "--master_port", "torchrun": "--master-port"}.get(Path(command[0]).name)
    command = [command[0], *([f"{port}={free_port()}"] if port else []), *command[1:]]
    if "--cfg" in command and "plan" not in command:
        command = [*command, "train.max_steps=3", "log.wandb=off"]
    process = subprocess.Popen(
        command, cwd=folder, env=environ, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=TIMEOUT)
    finally:
        kill_group(process.pid)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_links_in_the_docs_exist(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / page).read_text()
    known = (*COMMANDS, "bench", "theory")
    groups = "bench |theory |prepare |labels |checkpoint "
    for command in set(re.findall(rf"sopdist ((?:{groups})?[a-z0-9-]+)(?=[`; ,])", text)):
        if command.split()[0] in known:
            with pytest.raises(SystemExit) as stop:
                main([*command.split(), "--help"])
            assert stop.value.code == 0, command
    targets = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z-]+)", text):
        assert f"\n{target}:" in targets, target
    for link in re.findall(r"\]\(([\w/.]+)\)", text):
        assert ((ROOT / page).parent / link).exists(), link
    capsys.readouterr()


@pytest.mark.parametrize("page", ["README.md", "docs/train.md"])
def test_every_config_in_the_docs_loads_with_its_overrides(page: str) -> None:
    start = r"(?:train|train\.py|plan) --cfg ([a-z]\w*)((?: [a-z_]+\.[a-z_]+=\S+)*)"
    found = re.findall(start, (ROOT / page).read_text())
    assert found
    for name, overrides in found:
        load(name, overrides.replace("`", "").split())


def test_the_readme_names_every_config() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {path.stem for path in CONFIGS.glob("*.yaml")} <= named
