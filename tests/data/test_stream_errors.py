"""Errors of the stream: bad samples are reported, missing shards stop the run, and no threads or memory leak."""

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
from sopdist.data.shards import Member
from sopdist.data.stream import TooManyBadSamplesError
from sopdist.errors import DataError, ShardError
from tests.support.pictures import encoded, picture
from tests.support.small_splits import sample, write_split
from tests.support.streams import BACKENDS, BATCH, SAMPLES, by_sample, equal, open_stream, pictures


def damaged() -> list[Member]:
    """Sample 4 is truncated, 9 is empty, 21 is a PNG with a wrong checksum, 30 is too large, 40 is not an image."""
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
def test_unreadable_samples_keep_their_position_and_are_logged(
    tmp_path: Path, backend: str, caplog: pytest.LogCaptureFixture, folder: Path
) -> None:
    write_split(tmp_path / "train", damaged(), per_shard=9)
    bad = {4, 9, 21, 30, 40}
    options = {"max_bad_fraction": 0.2, "max_pixels": 1_000_000, "views": (None, Policy())}
    with open_stream(tmp_path / "train", backend, **options) as stream:
        batches = list(stream.epoch(0))
        assert stream.stats().bad == 5
    found = by_sample(batches)
    assert sorted(found) == sorted(set(range(SAMPLES)) - bad)
    for batch in batches:
        for position, index in enumerate(batch.index.tolist()):
            if index in bad:
                assert batch.weight[position] == 0
                assert (batch.images[position] == 0).all()
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
    # The other samples are the same as in the intact split.
    with open_stream(folder, backend, views=(None, Policy())) as stream:
        intact = by_sample(list(stream.epoch(0)))
    assert equal(found, {index: value for index, value in intact.items() if index not in bad})


@pytest.mark.parametrize("backend", BACKENDS)
def test_above_the_allowed_fraction_the_run_stops_and_lists_the_samples(tmp_path: Path, backend: str) -> None:
    write_split(tmp_path / "train", damaged(), per_shard=9)
    with open_stream(tmp_path / "train", backend, max_bad_fraction=0.05) as stream:
        with pytest.raises(TooManyBadSamplesError, match=r"3 samples could not be read in epoch 0") as stop:
            list(stream.epoch(0))
        named = [line for line in str(stop.value).splitlines() if ", key k/" in line]
        assert len(named) == 3
    with open_stream(tmp_path / "train", backend, max_bad_fraction=0) as stream, pytest.raises(TooManyBadSamplesError):
        list(stream.epoch(0))


@pytest.mark.parametrize("name", ["shard-000002.tar", "shard-000002.idx"])
def test_a_missing_shard_is_an_error_at_the_start(tmp_path: Path, name: str) -> None:
    write_split(tmp_path / "train", pictures(), per_shard=9)
    (tmp_path / "train" / name).unlink()
    with pytest.raises(ShardError, match=f"missing or of the wrong size: {name}; copy them again"):
        open_stream(tmp_path / "train")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shard_that_is_deleted_during_a_run_stops_it_and_marks_no_sample_as_bad(tmp_path: Path, backend: str) -> None:
    write_split(tmp_path / "train", pictures(), per_shard=9)
    with open_stream(tmp_path / "train", backend, max_bad_fraction=1.0) as stream:
        (tmp_path / "train" / "shard-000002.tar").unlink()
        with pytest.raises(ShardError, match=r"shard-000002\.tar: cannot be read"):
            list(stream.epoch(0))
        assert stream.stats().bad == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_abandoning_an_epoch_or_closing_twice_leaves_no_thread(folder: Path, backend: str) -> None:
    before = threading.active_count()
    with open_stream(folder, backend) as stream:
        undisturbed = by_sample(list(stream.epoch(2)))
    for _ in range(3):
        stream = open_stream(folder, backend)
        for epoch in range(2):
            for number, _ in enumerate(stream.epoch(epoch)):
                if number == 1:
                    break
        complete = by_sample(list(stream.epoch(2)))
        assert equal(complete, undisturbed), "an abandoned epoch does not affect the next"
        stream.close()
        stream.close()
    gc.collect()
    assert threading.active_count() == before


def test_memory_does_not_grow_from_epoch_to_epoch(folder: Path) -> None:
    with open_stream(folder, prefetch=2) as stream:
        held = []
        for epoch in range(4):
            for _ in stream.epoch(epoch):
                held.append(stream.stats().held_bytes)
        batch_bytes = BATCH * 3 * 224 * 224 * 4
        assert max(held) <= 5 * batch_bytes, "two ahead, one in progress, one in the loop, one spare"
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
        ({"labels": "clean"}, "no label set 'clean'; available: given"),
        ({"backend": "gpu"}, "data.backend = 'gpu'"),
        ({"device": 0}, "data.device = 0: needs backend dali"),
        ({"backend": "dali", "device": 0}, "there are 0 GPUs"),
        ({"prefetch": 0}, "data.prefetch = 0"),
        ({"max_bad_fraction": 1.5}, "data.max_bad_fraction = 1.5"),
        ({"rank": 2, "world_size": 2}, "rank 2 of 2"),
        ({"world_size": 13}, "some rank would get no sample"),
    ],
)
def test_invalid_settings_are_refused_with_the_name_of_the_key(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    before = threading.active_count()
    with pytest.raises(DataError, match=message):
        open_stream(folder, **options)
    assert threading.active_count() == before


def test_an_epoch_cannot_start_after_its_last_step(folder: Path) -> None:
    with open_stream(folder) as stream, pytest.raises(DataError, match="5 steps; it cannot start at step 6"):
        stream.epoch(0, 6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_new_epoch_abandons_the_previous_one_and_batches_are_never_mixed_up(folder: Path, backend: str) -> None:
    with open_stream(folder, backend) as stream:
        expected = by_sample(list(stream.epoch(1)))
        first = stream.epoch(0)
        next(first)
        assert equal(by_sample(list(stream.epoch(1))), expected)
        with pytest.raises(DataError, match="epoch 0 was abandoned: another epoch was started"):
            next(first)
        third = stream.epoch(2)
        next(third)
    with pytest.raises(DataError, match="or the stream was closed"):
        next(third)
    with pytest.raises(DataError, match="the stream is closed"):
        stream.epoch(3)


def test_a_folder_that_is_not_a_split_is_an_error_that_says_what_it_is(tmp_path: Path) -> None:
    write_split(tmp_path / "out" / "train", [sample(index) for index in range(4)])
    with pytest.raises(DataError, match="a folder of splits"):
        open_stream(tmp_path / "out")
    with pytest.raises(DataError, match="no such folder"):
        open_stream(tmp_path / "nowhere")


def test_the_allowed_fraction_refers_to_the_epoch_at_any_world_size(tmp_path: Path) -> None:
    members = [sample(index, image=b"" if 20 <= index < 24 else sample(index).image) for index in range(200)]
    write_split(tmp_path / "train", members, per_shard=20)
    for world_size in (1, 2, 4):
        bad = 0
        for rank in range(world_size):
            options = {"rank": rank, "world_size": world_size, "max_bad_fraction": 0.02, "block": 1}
            with open_stream(tmp_path / "train", recipe="cifar10", **options) as stream:
                list(stream.epoch(0))
                bad += stream.stats().bad
        assert bad == 4


def test_a_bad_sample_that_is_repeated_as_padding_on_another_rank_counts_once(tmp_path: Path) -> None:
    """The last batch, 192-199, has padding. Rank 2 repeats sample 192 there, and does not count it."""
    members = [sample(index, image=b"" if index == 192 else sample(index).image) for index in range(200)]
    write_split(tmp_path / "train", members, per_shard=20)
    found = []
    for rank in range(4):
        with open_stream(tmp_path / "train", recipe="cifar10", rank=rank, world_size=4, train=False) as stream:
            list(stream.epoch(0))
            found.append(stream.stats().bad)
    assert found == [1, 0, 0, 0]


def test_a_sample_that_dali_cannot_decode_costs_a_new_pipeline_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[object] = []
    build = dali.build_pipeline

    def pluralize(*args: Any) -> object:
        built.append(args)
        return build(*args)

    monkeypatch.setattr(dali, "build_pipeline", pluralize)
    write_split(tmp_path / "train", damaged(), per_shard=9)
    with open_stream(tmp_path / "train", "dali", max_bad_fraction=0.2, max_pixels=10_000_000) as stream:
        list(stream.epoch(0))
        after_one = len(built)
        assert after_one > 1, "the PNG with a wrong checksum passes the header check"
        list(stream.epoch(1))
        assert len(built) == after_one


@pytest.mark.parametrize("backend", BACKENDS)
def test_after_an_interrupt_at_any_moment_the_stream_continues_with_the_right_images(
    folder: Path, backend: str
) -> None:
    armed: list[bool] = []  # not an Event: its lock may be held when the signal arrives

    def interrupt(*_: object) -> None:
        if armed:
            armed.clear()
            raise KeyboardInterrupt

    with open_stream(folder, backend, "cifar10") as stream:
        expected = by_sample(list(stream.epoch(0)))
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
                    assert equal(by_sample(list(stream.epoch(0))), expected), number
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def test_a_stream_opened_before_a_fork_is_refused(folder: Path) -> None:
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
        assert sorted(by_sample(list(stream.epoch(0)))) == list(range(SAMPLES)), "the stream of the parent still works"


def test_the_number_of_torch_threads_is_unchanged(folder: Path) -> None:
    before = torch.get_num_threads()
    found = []
    try:
        torch.set_num_threads(3)
        with open_stream(folder, views=(None, Policy())) as stream:
            list(stream.epoch(0))
            other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
            other.start()
            other.join()
        assert torch.get_num_threads() == 3
        assert found == [3], "also in threads that start later"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seeds_outside_64_bits_are_refused(folder: Path, seed: int) -> None:
    with pytest.raises(DataError, match="seed = "):
        open_stream(folder, seed=seed)
