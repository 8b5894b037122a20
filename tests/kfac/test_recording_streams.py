"""Timelines of work on several streams: a clock that stands for a GPU's, whose streams have a time of their own."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from kfac.recording import Recorder
from kfac.timeline import COMPUTE_LANE


class Streams:
    """A clock of streams: issuing takes no time, and work has its stream to itself."""

    def __init__(self):
        self.at = {"main": 0.0, "side": 0.0}
        self.current = "main"

    def here(self):
        return self.current

    def now(self, stream=None):
        return self.at[stream or self.current]

    def synchronize(self):
        pass

    def elapsed_s(self, start, moment):
        return moment - start

    def work(self, seconds):
        self.at[self.current] += seconds

    @contextmanager
    def beside(self):
        self.at["side"] = max(self.at.values())
        self.current = "side"
        yield
        self.current = "main"


@pytest.fixture
def clock():
    return Streams()


@pytest.fixture
def recorder(clock):
    recorder = Recorder()
    recorder._clock = clock
    return recorder


def lane(timeline):
    return [(s.name, s.start_s, s.end_s) for s in timeline.spans if s.lane == COMPUTE_LANE and s.end_s > s.start_s]


def test_work_beside_a_span_does_not_stop_it(recorder, clock):
    recorder.start()
    with recorder.span("FF", "forward"):
        clock.work(2)
        with clock.beside(), recorder.span("FactorComp", "pack"):
            clock.work(1)
        clock.work(5)
    timeline = recorder.stop()
    assert timeline.iteration_s == 7
    assert lane(timeline) == [("forward", 0, 2), ("pack", 2, 3), ("forward", 3, 7)]


def test_work_beside_a_span_that_ends_later_has_the_rest(recorder, clock):
    recorder.start()
    with recorder.span("FF", "forward"):
        clock.work(2)
        with clock.beside(), recorder.span("FactorComp", "pack"):
            clock.work(4)
        clock.work(1)
    with recorder.span("BP", "backward"):
        clock.work(6)
    timeline = recorder.stop()
    assert lane(timeline) == [("forward", 0, 2), ("forward", 2, 3), ("pack", 3, 6), ("backward", 6, 9)]
    assert sum(timeline.breakdown_s().values()) == timeline.iteration_s == 9
    busy = timeline.busy_s()
    assert (busy["FF"], busy["FactorComp"], busy["BP"]) == (3, 3, 3)


def test_what_ends_after_the_iteration_is_cut(recorder, clock):
    recorder.start()
    with clock.beside(), recorder.span("InverseComp", "invert"):
        clock.work(3)
    clock.work(2)
    assert lane(recorder.stop()) == [("invert", 0, 2)]
