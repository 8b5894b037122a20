"""Trackers: sinks that get a copy of what the run record holds. They may fail; the run goes on."""

from experiments.tracking.facts import RunFacts, tracking_id
from experiments.tracking.interface import RecordedIteration, Sink
from experiments.tracking.last_word import tell_failure
from experiments.tracking.settings import TrackingSettings
from experiments.tracking.tracker import Tracker, open_tracker

__all__ = [
    "RecordedIteration",
    "RunFacts",
    "Sink",
    "Tracker",
    "TrackingSettings",
    "open_tracker",
    "tell_failure",
    "tracking_id",
]
