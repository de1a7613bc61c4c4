"""The stream in trouble: bad samples are named, shards are not guessed at, nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from sopdist.data.augment.policy import Policy
from sopdist.data.decode import dali
from sopdist.data.errors import DataError, ShardError
from sopdist.data.shards import Member
from sopdist.data.stream import TooManyBadSamplesError
from tests.data.pictures import encoded, picture
from tests.data.small_splits import sample, write_split
from tests.data.streams import BACKENDS, BATCH, SAMPLES, by_sample, equal, kept, open_stream, pictures


def damaged() -> list[Member]:
    """Sample 4 has no end, 9 is empty, 21 is a PNG with a wrong checksum, 30 is larger than allowed, 40 no image."""
    members = pictures()
    png = bytearray(encoded(picture(21), "PNG"))
    png[len(png) // 2] ^= 0xFF
    changes = {
        4: members[4].image[:-20],
        9: b"",
        21: bytes(png),
        30: encoded(Image.new("RGB", (2000, 2000)), "PNG"),
        40: b"<html>",
    }
    for index, data in changes.items():
        members[index] = members[index]._replace(image=data, extension="png" if index in (21, 30) else "jpg")
    return members


@pytest.mark.parametrize("backend", BACKENDS)
def test_unreadable_samples_keep_their_place_and_are_named(
    tmp_path: Path, backend: str, caplog: pytest.LogCaptureFixture, folder: Path
) -> None:
    write_split(tmp_path / "train", damaged(), per_shard=9)
    bad = {4, 9, 21, 30, 40}
    options = {"max_bad_fraction": 0.2, "max_pixels": 1_000_000, "strong": Policy()}
    with open_stream(tmp_path / "train", backend, **options) as stream:
        batches = kept(stream.epoch(0))
        assert stream.stats().bad == 5
    found = by_sample(batches)
    assert sorted(found) == sorted(set(range(SAMPLES)) - bad)
    for batch in batches:
        for place, index in enumerate(batch.index.tolist()):
            if index in bad:
                assert batch.weight[place] == 0
                assert (batch.images[place] == 0).all()
    for index, reason in (
        (4, "no end marker"),
        (9, "empty file"),
        (21, "damaged PNG"),
        (30, "2000 x 2000"),
        (40, "HTML"),
    ):
        (message,) = (record.getMessage() for record in caplog.records if f"index {index}:" in record.getMessage())
        assert f"shard-{index // 9:06d}.tar, key k/{index}, index {index}" in message
        assert reason in message
    # The others look as they do in sound company.
    with open_stream(folder, backend, strong=Policy()) as stream:
        sound = by_sample(kept(stream.epoch(0)))
    assert equal(found, {index: value for index, value in sound.items() if index not in bad})


@pytest.mark.parametrize("backend", BACKENDS)
def test_past_the_allowed_share_the_run_stops_with_the_list(tmp_path: Path, backend: str) -> None:
    write_split(tmp_path / "train", damaged(), per_shard=9)
    with open_stream(tmp_path / "train", backend, max_bad_fraction=0.05) as stream:
        with pytest.raises(TooManyBadSamplesError, match=r"3 samples could not be read in epoch 0") as stop:
            kept(stream.epoch(0))
        named = [line for line in str(stop.value).splitlines() if ", key k/" in line]
        assert len(named) == 3
    with open_stream(tmp_path / "train", backend, max_bad_fraction=0) as stream, pytest.raises(TooManyBadSamplesError):
        kept(stream.epoch(0))


@pytest.mark.parametrize("name", ["shard-000002.tar", "shard-000002.idx"])
def test_a_shard_that_is_missing_is_named_at_once(tmp_path: Path, name: str) -> None:
    write_split(tmp_path / "train", pictures(), per_shard=9)
    (tmp_path / "train" / name).unlink()
    with pytest.raises(ShardError, match=f"missing or of the wrong size: {name}; copy them again"):
        open_stream(tmp_path / "train")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shard_that_vanishes_during_a_run_stops_it_and_blames_no_sample(tmp_path: Path, backend: str) -> None:
    write_split(tmp_path / "train", pictures(), per_shard=9)
    with open_stream(tmp_path / "train", backend, max_bad_fraction=1.0) as stream:
        (tmp_path / "train" / "shard-000002.tar").unlink()
        with pytest.raises(ShardError, match=r"shard-000002\.tar: cannot be read"):
            kept(stream.epoch(0))
        assert stream.stats().bad == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_leaving_an_epoch_early_or_closing_twice_leaves_no_thread(folder: Path, backend: str) -> None:
    before = threading.active_count()
    with open_stream(folder, backend) as stream:
        undisturbed = by_sample(kept(stream.epoch(2)))
    for _ in range(3):
        stream = open_stream(folder, backend)
        for epoch in range(2):
            for number, _ in enumerate(stream.epoch(epoch)):
                if number == 1:
                    break
        complete = by_sample(kept(stream.epoch(2)))
        assert equal(complete, undisturbed), "an abandoned epoch leaves nothing in the next"
        stream.close()
        stream.close()
    gc.collect()
    assert threading.active_count() == before


def test_memory_does_not_grow_with_the_epochs(folder: Path) -> None:
    with open_stream(folder, prefetch=2) as stream:
        held = []
        for epoch in range(4):
            for _ in stream.epoch(epoch):
                held.append(stream.stats().held_bytes)
        batch_bytes = BATCH * 3 * 224 * 224 * 4
        assert max(held) <= 5 * batch_bytes, "two ahead, one under way, one in the loop's hands, one to spare"
        assert stream.stats().samples == 4 * 5 * BATCH


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_that_are_kept_do_not_change(folder: Path, backend: str) -> None:
    with open_stream(folder, backend, prefetch=1) as stream:
        batches, copies = [], []
        for epoch in range(3):
            for batch in stream.epoch(epoch):
                batches.append(batch)
                copies.append(batch.images.clone())
        assert all(torch.equal(batch.images, copy) for batch, copy in zip(batches, copies, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "imagenot"}, "no such recipe"),
        ({"labels": "clean"}, "no label set 'clean'; there is: given"),
        ({"backend": "gpu"}, "data.backend = 'gpu'"),
        ({"device": 0}, "data.device = 0: needs backend dali"),
        ({"backend": "dali", "device": 0}, "there are 0 GPUs"),
        ({"prefetch": 0}, "data.prefetch = 0"),
        ({"max_bad_fraction": 1.5}, "data.max_bad_fraction = 1.5"),
        ({"rank": 2, "world_size": 2}, "rank 2 of 2"),
        ({"world_size": 13}, "no sample for some rank"),
    ],
)
def test_wrong_settings_are_refused_by_name(folder: Path, options: dict[str, Any], message: str) -> None:
    before = threading.active_count()
    with pytest.raises(DataError, match=message):
        open_stream(folder, **options)
    assert threading.active_count() == before


def test_an_epoch_does_not_start_after_its_end(folder: Path) -> None:
    with open_stream(folder) as stream, pytest.raises(DataError, match="5 steps; it cannot start at step 6"):
        stream.epoch(0, 6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_new_epoch_ends_the_one_before_and_batches_are_never_mixed_up(folder: Path, backend: str) -> None:
    with open_stream(folder, backend) as stream:
        expected = by_sample(kept(stream.epoch(1)))
        first = stream.epoch(0)
        next(first)
        assert equal(by_sample(kept(stream.epoch(1))), expected)
        with pytest.raises(DataError, match="epoch 0 was left for another one"):
            next(first)
        third = stream.epoch(2)
        next(third)
    with pytest.raises(DataError, match="or the stream was closed"):
        next(third)
    with pytest.raises(DataError, match="the stream is closed"):
        stream.epoch(3)


def test_a_folder_that_is_not_a_split_says_what_it_is(tmp_path: Path) -> None:
    write_split(tmp_path / "out" / "train", [sample(index) for index in range(4)])
    with pytest.raises(DataError, match="a folder of splits"):
        open_stream(tmp_path / "out")
    with pytest.raises(DataError, match="no such folder"):
        open_stream(tmp_path / "nowhere")


def test_the_allowed_share_is_of_the_epoch_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    members = [sample(index, image=b"" if 20 <= index < 24 else sample(index).image) for index in range(200)]
    write_split(tmp_path / "train", members, per_shard=20)
    for world_size in (1, 2, 4):
        bad = 0
        for rank in range(world_size):
            options = {"rank": rank, "world_size": world_size, "max_bad_fraction": 0.02, "block": 1}
            with open_stream(tmp_path / "train", recipe="cifar10", **options) as stream:
                kept(stream.epoch(0))
                bad += stream.stats().bad
        assert bad == 4


def test_a_bad_sample_that_fills_a_gap_of_another_rank_counts_once(tmp_path: Path) -> None:
    """The last row, 192-199, has gaps; rank 2 shows 192 again in one, and does not count it."""
    members = [sample(index, image=b"" if index == 192 else sample(index).image) for index in range(200)]
    write_split(tmp_path / "train", members, per_shard=20)
    found = []
    for rank in range(4):
        with open_stream(tmp_path / "train", recipe="cifar10", rank=rank, world_size=4, train=False) as stream:
            kept(stream.epoch(0))
            found.append(stream.stats().bad)
    assert found == [1, 0, 0, 0]


def test_what_dali_refused_once_costs_a_new_pipeline_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[object] = []
    build = dali.build_pipeline

    def counted(*args: Any) -> object:
        built.append(args)
        return build(*args)

    monkeypatch.setattr(dali, "build_pipeline", counted)
    write_split(tmp_path / "train", damaged(), per_shard=9)
    with open_stream(tmp_path / "train", "dali", max_bad_fraction=0.2, max_pixels=10_000_000) as stream:
        kept(stream.epoch(0))
        after_one = len(built)
        assert after_one > 1, "the PNG with a wrong checksum passes our look at its header"
        kept(stream.epoch(1))
        assert len(built) == after_one


@pytest.mark.parametrize("backend", BACKENDS)
def test_interrupts_at_any_moment_leave_a_stream_that_goes_on_with_the_right_pictures(
    folder: Path, backend: str
) -> None:
    armed: list[bool] = []  # not an Event: its lock may be held when the signal comes

    def interrupt(*_: object) -> None:
        if armed:
            armed.clear()
            raise KeyboardInterrupt

    with open_stream(folder, backend, "cifar10") as stream:
        expected = by_sample(kept(stream.epoch(0)))
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            for number in range(40):
                signal.setitimer(signal.ITIMER_REAL, 0.0005 * (1 + number % 23))
                with suppress(KeyboardInterrupt):
                    armed.append(True)
                    for _ in stream.epoch(1):
                        pass
                    time.sleep(0.02)
                    armed.clear()
                signal.setitimer(signal.ITIMER_REAL, 0)
                if number % 5 == 4:
                    assert equal(by_sample(kept(stream.epoch(0))), expected), number
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def test_a_stream_from_before_a_fork_says_so(folder: Path) -> None:
    with open_stream(folder) as stream:
        child = os.fork()
        if child == 0:
            try:
                next(stream.epoch(0))
            except DataError as error:
                os._exit(7 if "before a fork" in str(error) else 8)
            os._exit(9)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        assert sorted(by_sample(kept(stream.epoch(0)))) == list(range(SAMPLES)), "the parent's goes on"


def test_torch_keeps_its_number_of_threads(folder: Path) -> None:
    before = torch.get_num_threads()
    found = []
    try:
        torch.set_num_threads(3)
        with open_stream(folder, strong=Policy()) as stream:
            kept(stream.epoch(0))
            other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
            other.start()
            other.join()
        assert torch.get_num_threads() == 3
        assert found == [3], "and so do threads that start later"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seeds_that_would_repeat_others_are_refused(folder: Path, seed: int) -> None:
    with pytest.raises(DataError, match="seed = "):
        open_stream(folder, seed=seed)
