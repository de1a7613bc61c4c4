"""State that ZeRO partitions is saved in full: frozen and tied weights, sizes that ranks do not divide, AdamW's step,
and the state of an optimizer that started without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launching import launch


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_an_awkward_network_is_restored_exactly_and_keeps_training(tmp_path: Path, ranks: int) -> None:
    ended = launch("torchrun", "tests.support.zero_worker", [str(tmp_path)], ranks)
    reported = [line for line in ended.stdout.splitlines() if line.startswith("ZeRO")]
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert reported == [f"ZeRO {stage}, {name}: identical" for stage in (1, 2, 3) for name in ("sgd", "adamw")]
