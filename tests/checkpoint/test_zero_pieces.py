"""What ZeRO has cut up is saved whole: frozen and shared weights, sizes that ranks do not divide, AdamW's step, and the
memory of an optimizer that began without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.launching import launch


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_an_awkward_network_comes_back_as_it_was_and_goes_on(tmp_path: Path, ranks: int) -> None:
    ended = launch("torchrun", "tests.checkpoint.zero_worker", [str(tmp_path)], ranks)
    told = [line for line in ended.stdout.splitlines() if line.startswith("ZeRO")]
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert told == [f"ZeRO {stage}, {name}: as it was" for stage in (1, 2, 3) for name in ("sgd", "adamw")]
