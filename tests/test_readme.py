"""The README's example runs as it is printed, and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sopdist.cli import main

ROOT = Path(__file__).parent.parent


class Clusters(torch.utils.data.Dataset[tuple[Tensor, int, int]]):
    """Ten well separated clusters, 30% of the labels drawn anew."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.true = torch.randint(10, (600,), generator=generator)
        centres = torch.randn(10, 20, generator=generator) * 3
        self.points = centres[self.true] + torch.randn(600, 20, generator=generator)
        redrawn = torch.rand(600, generator=generator) < 0.3
        self.labels = torch.where(redrawn, torch.randint(10, (600,), generator=generator), self.true)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, int, int]:
        return self.points[i], int(self.labels[i]), i


def python_examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_commands_and_the_example_of_shards_run_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text()
    (commands,) = re.findall(r"```\n(\.venv/bin/sopdist prepare digits.*?)```", text, re.DOTALL)
    for command in commands.splitlines():
        assert main(command.split()[1:]) == 0, command
    assert (tmp_path / "digits.png").exists()
    capsys.readouterr()
    torch.manual_seed(0)
    _, example = python_examples()
    exec(example, {})
    found = re.search(r"(\d+)% of the 100 most suspicious labels are wrong", capsys.readouterr().out)
    assert found is not None
    assert int(found[1]) >= 95


def test_the_five_line_example_runs_as_printed_and_finds_wrong_labels() -> None:
    example, _ = python_examples()
    torch.manual_seed(0)
    dataset = Clusters()
    model = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 10))
    names: dict[str, Any] = {
        "dataset": dataset,
        "all_labels": dataset.labels,
        "epochs": 12,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        "loader": torch.utils.data.DataLoader(dataset, batch_size=50, shuffle=True),
    }
    exec(example, names)
    sop, wrong = names["sop"], dataset.labels != dataset.true
    assert float(wrong[sop.suspects(100)].float().mean()) > 0.95
    assert float((sop.proposed_labels(dataset.labels) == dataset.true).float().mean()) > 0.95
    assert abs(sop.noise_rate() - float(wrong.float().mean())) < 0.05


@pytest.mark.parametrize("page", ["README.md", "docs/noise.md", "docs/data.md", "CONTRIBUTING.md"])
def test_commands_and_links_in_the_docs_exist(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / page).read_text()
    known = ("demo", "bench", "prepare", "labels", "verify", "inspect")
    for command in set(re.findall(r"sopdist ((?:bench |prepare |labels )?[a-z0-9-]+)(?=[`; ,])", text)):
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
