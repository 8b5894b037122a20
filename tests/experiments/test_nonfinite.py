"""Numbers that are not finite: what ends a run says what to do, and a run that goes on says how much it left out."""

from tests.experiments.conftest import SMALL

RUN = (*SMALL, "schedule=kfac", "iterations=6", "timeline.count=0", "evaluation.every=100")


def test_skipped_steps_are_counted_at_the_end(command):
    done = command("train", *RUN, "optimizer.lr=1e30", "kfac.nonfinite=skip")
    assert "of 6 steps were skipped, because statistics or gradients were not finite" in done.stdout
    usual = command("train", *RUN, "kfac.nonfinite=skip")
    assert "finished: " in usual.stdout
    assert "skipped" not in usual.stdout, "the control"


def test_the_error_names_the_remedy(command):
    done = command("train", *RUN, "optimizer.lr=1e30", check=False)
    assert done.returncode == 1
    assert "failed: NonFiniteError: step " in done.stderr
    assert "look for what has exploded there (the learning rate, the loss" in done.stderr
