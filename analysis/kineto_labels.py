"""What single events of a trace of ``torch.profiler`` are for, by their names and what is around them.

The rules are those of :mod:`analysis.kineto`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kfac.timeline import COMMUNICATION_KINDS, KINDS

Rule = tuple[re.Pattern[str], str]
"""Events whose names a pattern finds are of this kind."""

_RANGE = re.compile(rf"({'|'.join(KINDS)})\b\W*(.*)")
_COLLECTIVE_NAME = re.compile(
    r"(?:gloo:|ncclDevKernel_|ncclKernel_|nccl:)([A-Za-z]+(?:_(?!Sum|Ring|RING|Tree|TREE|LL)[a-z]+)*)"
)
_INVERSE = re.compile(r"aten::_?(?:linalg_(?:cholesky|eigh|inv|solve|svd|lu|ldl|qr)|cholesky)")
BACKWARD = "autograd::engine::evaluate_function"
_NO_KIND = ("Optimizer.", "enumerate(DataLoader)")


@dataclass(frozen=True)
class Label:
    """What a moment is for; no kind: nothing of ours."""

    kind: str | None
    name: str = ""
    explicit: bool = False  # said by a range, so that operators inside do not know better
    whole: bool = False  # of a range, which says when it ends: Python between two of them is not theirs
    within: Label | None = None  # of communication: what the thread computes meanwhile

    @property
    def computing(self) -> Label:
        """What the thread that is here works for."""
        return (self.within or NOTHING) if self.kind in COMMUNICATION_KINDS else self


NOTHING = Label(None, explicit=True)


def parse_rules(texts: Iterable[str]) -> list[Rule]:
    """Rules from ``PATTERN=KIND``.

    Raises:
        ValueError: for another form, a kind that there is not, or a pattern that is no regular expression.
    """
    rules = []
    for text in texts:
        pattern, _, kind = text.rpartition("=")
        if not pattern or kind not in KINDS:
            raise ValueError(f"--rule {text}: give PATTERN=KIND with a kind of: {', '.join(KINDS)}")
        try:
            rules.append((re.compile(pattern), kind))
        except re.error as error:
            raise ValueError(f"--rule {text}: {pattern!r} is no regular expression: {error}") from error
    return rules


def is_message(name: str) -> bool:
    """Whether this is the name of a range of communication."""
    match = _RANGE.match(name)
    return match is not None and match[1] in COMMUNICATION_KINDS


def label_of(name: str, is_range: bool, around: Label, rules: Sequence[Rule], passes_over: bool) -> Label:
    """What an event is for.

    Args:
        name: of the event.
        is_range: whether it is a range that a program has made, no operator.
        around: what the event is for that it is in.
        rules: what tells kinds before everything else.
        passes_over: whether the iteration's last backward pass has ended.
    """
    for pattern, kind in rules:
        if pattern.search(name):
            return Label(kind, name, explicit=True, within=around.computing)
    if is_range:
        return _of_range(name, around)
    return around if around.explicit and around.kind else _of_operator(name, around, passes_over)


def _of_range(name: str, around: Label) -> Label:
    """What a range of K-FAC, a user, the optimizer or a loader of batches says."""
    if match := _RANGE.match(name):
        return Label(match[1], match[2] or match[1], explicit=True, whole=True, within=around.computing)
    return NOTHING if name.startswith(_NO_KIND) else around


def _of_operator(name: str, around: Label, passes_over: bool) -> Label:
    """What an operator is for that no range tells."""
    if name.startswith(BACKWARD):
        return Label("BP", "backward")
    if name.startswith("c10d::"):
        return around if around.kind else NOTHING
    if around.kind not in ("BP", "InverseComp") and _INVERSE.match(name):
        return Label("InverseComp", name)
    if around.kind or around is NOTHING or passes_over:
        return around
    return Label("FF", "forward")


def collective_label(name: str, issued: Label, told: bool) -> Label:
    """What a collective is for.

    Args:
        name: of its range or kernel.
        issued: what the moment was for in which it was issued.
        told: whether the trace has ranges of communication.
    """
    if issued.kind in COMMUNICATION_KINDS:
        return issued
    match = _COLLECTIVE_NAME.search(name)
    short = match[1] if match else name
    if "barrier" in short.lower():
        return NOTHING
    if "broadcast" in short.lower():
        return Label(None if told else "InverseComm", short)
    return Label("GradComm", short)
