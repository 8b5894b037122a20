"""The ablation switches: every algorithm of the paper, and every variant of it, is one value of this class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from kfac.planning.checks import number

CHOICES: dict[str, tuple[str, ...]] = {
    "pipelining": ("none", "layerwise"),
    "fusion": ("none", "threshold", "greedy", "optimal"),
    "placement": ("non_dist", "seq_dist", "lbp", "optimized"),
    "inverse_start": ("after_all", "as_ready"),
    "inverse_broadcast": ("after_all", "as_ready"),
    "factor_collective": ("all_reduce", "reduce_to_owner", "none"),
    "message_dtype": ("full", "bfloat16"),
    "inverse_fusion": ("none", "owner", "planned"),
}
"""The values of every switch that has a fixed set of them."""


def check_lbp_rule(what: str, rule: Any) -> None:
    """Refuse what is no rule for the factors that every rank inverts under ``lbp``.

    Raises:
        ValueError: if ``rule`` is neither ``cost`` nor a dimension.
    """
    if isinstance(rule, bool) or not (rule == "cost" or (isinstance(rule, int) and rule >= 0)):
        raise ValueError(f"{what}={rule!r} is neither 'cost' nor a dimension (a whole number >= 0)")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """What a schedule varies; none of it changes the mathematics but ``factor_collective=none``, and ``message_dtype``
    the rounding.

    Args:
        curvature: off means plain (S-)SGD: ``KFAC.step`` only finishes the gradients' all-reduce.
        pipelining: ``layerwise`` sends a message as soon as its factors are there, ``none`` after the backward pass.
        fusion: how consecutive factors are merged into messages. ``none``: one each; ``threshold``: up to
            ``threshold_bytes``; ``greedy``: the rule in the paper's code (MG-WFBP's); ``optimal``: the exact program.
        threshold_bytes: the threshold of ``threshold`` (64 MiB is Horovod 0.19's default, the paper's baseline).
        placement: which rank inverts what. ``non_dist``: all ranks all of it; ``seq_dist``: round robin over
            A0 G0 A1 G1 ...; ``lbp``: the paper's load-balancing placement; ``optimized``: ours.
        lbp_rule: which factors every rank inverts under ``lbp``: ``cost`` (inverting is cheaper than broadcasting),
            or a dimension below which they are (the paper's runs hard-wired 1400).
        inverse_start: ``after_all``: inversions begin when all messages have arrived; ``as_ready``: a factor can be
            inverted as soon as both sums of its layer have, so that the messages after them overlap with inversions.
        inverse_broadcast: ``as_ready`` overlaps broadcasts with later inversions, ``after_all`` does not.
        inverse_fusion: which inverses of one owner share a broadcast. ``none``: each travels alone; ``owner``: all of
            an owner's together; ``planned``: divided so that the last broadcast ends early, never later than either.
        factor_collective: how factors travel. ``all_reduce``: every rank gets the sums; ``reduce_to_owner``: sums
            that only one rank inverts go to that rank alone; ``none``: not at all, a layer's owner uses the statistics
            of its own samples (DP-KFAC, other mathematics: see docs/kfac.md).
        message_dtype: in which factors travel: ``full``, as they are kept; ``bfloat16``, rounded to half the bytes.
        gradient_worker_fraction: the share of the inverses' elements that a rank holds on average. Where it is below 1,
            the layers with the most elements are preconditioned by the one rank that inverts both of their factors,
            which broadcasts the result, until the share is reached; 0: all layers are.
        gradient_pipelining: whether gradients' all-reduces start during the backward pass.

    Raises:
        ValueError: for a value outside the choices, naming the key and the choices, and for switches that exclude each
            other.
    """

    curvature: bool = True
    pipelining: str = "layerwise"
    fusion: str = "greedy"
    threshold_bytes: int = 64 * 2**20
    placement: str = "lbp"
    lbp_rule: str | int = "cost"
    inverse_start: str = "after_all"
    inverse_broadcast: str = "as_ready"
    inverse_fusion: str = "none"
    factor_collective: str = "all_reduce"
    message_dtype: str = "full"
    gradient_worker_fraction: float = 1.0
    gradient_pipelining: bool = True

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"schedule.{name}={getattr(self, name)!r} is not one of: {', '.join(choices)}")
        for name in ("curvature", "gradient_pipelining"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"schedule.{name}={getattr(self, name)!r} is not true or false")
        if isinstance(self.threshold_bytes, bool) or not isinstance(self.threshold_bytes, int):
            raise ValueError(f"schedule.threshold_bytes={self.threshold_bytes!r} is not a whole number of bytes")
        if self.threshold_bytes <= 0:
            raise ValueError(f"schedule.threshold_bytes={self.threshold_bytes} must be positive")
        check_lbp_rule("schedule.lbp_rule", self.lbp_rule)
        fraction = number("schedule.gradient_worker_fraction", self.gradient_worker_fraction)
        if fraction > 1:
            raise ValueError(f"schedule.gradient_worker_fraction={fraction} is a share, from 0 to 1")
        object.__setattr__(self, "gradient_worker_fraction", fraction)
        self._check_combination()

    def _check_combination(self) -> None:
        counted = self.factor_collective == "all_reduce" and self.message_dtype == "full"
        if self.inverse_start == "as_ready" and not counted:
            raise ValueError(
                "schedule.inverse_start=as_ready needs factor_collective=all_reduce and message_dtype=full: otherwise "
                "what ranks must know of a sum travels behind all messages"
            )
        if self.gradient_worker_fraction < 1 and self.placement == "non_dist":
            raise ValueError(
                "schedule.gradient_worker_fraction below 1 leaves layers to one rank, but with placement=non_dist "
                "every rank inverts everything: take another placement, or gradient_worker_fraction=1"
            )
        if self.factor_collective == "none":
            if self.gradient_worker_fraction > 0:
                raise ValueError(
                    "schedule.factor_collective=none needs gradient_worker_fraction=0: factors that do not travel "
                    "differ between the ranks, so one of them must precondition each layer (schedule dp_kfac)"
                )
            if self.message_dtype != "full":
                raise ValueError("schedule.message_dtype is of factors that travel: not with factor_collective=none")

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ScheduleConfig:
        """The value of a JSON form.

        Raises:
            ValueError: for an unknown key, naming the keys there are.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"a schedule's switches must be an object with keys, got {data!r}")
        known = [f.name for f in fields(cls)]
        unknown = sorted(str(key) for key in data if key not in known)
        if unknown:
            raise ValueError(f"unknown schedule key(s) {', '.join(unknown)}; keys: {', '.join(known)}")
        return cls(**dict(data))
