"""The costs of this machine's collectives and inverses: the profile that ``python -m experiments.profile`` wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kfac.planning import ClusterProfile
from kfac.planning.costs import Cost
from paper_figures.item import Context, Provenance

PLACES = (Path("profiles/cluster_profile.json"), Path("reproduce/profiles/cluster_profile.json"))
"""Where it is below the folder of runs: the first of these that exists."""
NO_PROFILE = "no profile of this machine in {}: python -m experiments.profile, or make reproduce, makes one"


@dataclass(frozen=True)
class Points:
    """Measured seconds at some sizes, and the cost fitted to them.

    Args:
        sizes: elements of a message, or dimensions.
        seconds: the median at each of them.
        fit: the cost.
        label: what was measured, for a legend.
        quartiles_s: the lower and the upper quartile at each size; None in profiles from before these were kept.
        fit_error: the median relative error of the fit, where the profile says it.
    """

    sizes: Sequence[float]
    seconds: Sequence[float]
    fit: Cost
    label: str
    quartiles_s: tuple[Sequence[float], Sequence[float]] | None = None
    fit_error: float | None = None

    @property
    def fit_label(self) -> str:
        """The fit's name in a legend."""
        return "fit to it" if self.fit_error is None else f"fit to it, median error {self.fit_error:.0%}"

    def record(self, provenance: Provenance, name: str) -> None:
        """Write down every point."""
        low, high = self.quartiles_s or ((), ())
        for statistic, values in (("", self.seconds), ("/q25", low), ("/q75", high)):
            for size, value in zip(self.sizes, values, strict=False):
                provenance.add(f"measured/{name}/{size:g}{statistic}", value, "measured", input="profile")


def _points(data: dict[str, Any], sizes: Sequence[float], name: str, profile: ClusterProfile) -> Points:
    quartiles = data.get("q25_s", ()), data.get("q75_s", ())
    known = all(len(side) == len(sizes) for side in quartiles)
    ranks = "one process" if name == "inverse" else f"{profile.world_size} ranks"
    label = f"measured here, {ranks}" + (" (median, quartiles)" if known else " (median)")
    fit: Cost = getattr(profile, name)
    return Points(sizes, data["seconds"], fit, label, quartiles if known else None, data.get("fit_error"))


def measured_costs(context: Context, provenance: Provenance) -> tuple[dict[str, Points], tuple[str, ...]]:
    """Points by ``all_reduce``, ``broadcast`` and ``inverse``, and warnings; none without a profile."""
    path = next((context.runs / place for place in PLACES if (context.runs / place).is_file()), None)
    if path is None:
        return {}, (NO_PROFILE.format(context.runs),)
    try:
        profile = ClusterProfile.load(path)
    except ValueError as error:
        return {}, (str(error),)
    found = {}
    for name, sizes in (("all_reduce", "elements"), ("broadcast", "elements"), ("inverse", "dims")):
        data: Any = profile.provenance.get(name)
        if isinstance(data, dict) and data.get(sizes) and len(data[sizes]) == len(data.get("seconds", ())):
            found[name] = _points(data, data[sizes], name, profile)
    facts = {key: value for key, value in profile.provenance.items() if not isinstance(value, dict)}
    place = path.relative_to(context.runs).as_posix()
    provenance.inputs["profile"] = {"file": place, "made_by": "python -m experiments.profile", **facts}
    return found, ()
