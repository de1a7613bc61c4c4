"""Progress: what a checkpoint keeps of it, and what stays with the run that saved it."""

from __future__ import annotations

from sopdist.train.progress import Progress


def test_a_resumed_run_has_the_progress_that_was_saved() -> None:
    saved = Progress(step=7, best=0.5, best_step=4, failed_saves=2)
    resumed = Progress()
    resumed.load_state(saved.state(), same_run=True)
    assert resumed == saved


def test_the_best_result_of_another_run_is_not_loaded() -> None:
    resumed = Progress()
    resumed.load_state(Progress(step=7, best=0.5, best_step=4, failed_saves=2).state(), same_run=False)
    assert resumed == Progress(step=7, failed_saves=2)


def test_the_streak_of_nonfinite_steps_is_not_saved() -> None:
    assert Progress(nonfinite_streak=3, network_lost=True).state() == Progress().state()


def test_older_checkpoints_lack_the_step_of_the_best_network_and_failed_saves() -> None:
    resumed = Progress()
    resumed.load_state({"step": 3, "best": 0.25}, same_run=True)
    assert resumed == Progress(step=3, best=0.25)
