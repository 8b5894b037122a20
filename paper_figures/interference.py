"""What an ideal simulation of the paper's cluster leaves out, fitted to few of its rows; the others are predictions.

``python -m paper_figures.interference`` fits and writes ``interference.json`` beside this file. What is fitted to what:

* factor messages, to the D-KFAC rows of all models, where nothing overlaps: seconds per element and per factor;
* waiting, to the S-SGD row of each model: what of GradComm the simulated gradient messages do not explain;
* a broadcast's start-up, to ResNet-50's MPD-KFAC row (no D-KFAC row has a broadcast); one number cannot tell start-up
  from bandwidth, so that the bandwidth is the line's;
* the slowdown of computing under communication, to ResNet-50's SPD-KFAC row.

No parameter is fitted to the MPD-KFAC and SPD-KFAC rows of the other three models: they are predicted. But which of the
candidates is used was chosen with their errors in view; ``interference.json`` has the errors of all of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq, least_squares, nnls

from kfac.planning import ClusterProfile, LinearCost, ModelProfile, Plan, PolynomialCost, ScheduleConfig
from kfac.planning.profiles import DisturbedCluster, Interference
from kfac.planning.shipped_profiles import load_shipped_cluster, load_shipped_model
from kfac.schedules import NAMED_SCHEDULES, make_plan
from kfac.simulation import simulated_iteration_s
from paper_figures import published
from paper_figures.paper_cluster import CLUSTER_NAME

PATH = Path(__file__).with_name("interference.json")
PROFILES = Path(__file__).with_name("profiles")
"""Where the fitted profile of the cluster lies for each model."""
COMMAND = "python -m paper_figures.interference"
FITTED_MODEL = "resnet50"
"""The one model whose MPD-KFAC and SPD-KFAC rows are fitted."""
LINE_S_PER_ELEMENT = 32 / 100e9
"""Seconds of a 32-bit element on the cluster's 100 Gb/s InfiniBand."""
AS_RUN = replace(NAMED_SCHEDULES["spdkfac"], lbp_rule=published.lbp_threshold_dim())
"""SPD-KFAC as the authors' final runs had it: a dimension threshold in place of the rule that the paper describes."""
SCHEDULES: Mapping[str, ScheduleConfig] = {
    "D-KFAC": NAMED_SCHEDULES["dkfac"],
    "MPD-KFAC": NAMED_SCHEDULES["mpdkfac"],
    "SPD-KFAC": AS_RUN,
}
"""The schedule of each published row."""
SPEEDUPS = {"SP1": "D-KFAC", "SP2": "MPD-KFAC"}
"""The paper's two speed-ups of SPD-KFAC, and over what."""


@dataclass(frozen=True)
class Fit:
    """The parameters.

    Args:
        element_s, item_s: of a factor or gradient message, per element and per factor or gradient in it.
        message_s: start-up of a factor or gradient message.
        broadcast_s, broadcast_element_s: start-up of a broadcast, and seconds per element.
        slowdown: the part of its speed that computing loses while a collective is under way.
        wait_s: per model, waiting in an iteration.
    """

    element_s: float
    item_s: float
    message_s: float
    broadcast_s: float
    broadcast_element_s: float
    slowdown: float
    wait_s: Mapping[str, float]

    def cluster(self, key: str) -> ClusterProfile:
        """The paper's cluster for a model, with these parameters."""
        waiting = Interference(slowdown=self.slowdown, item_s=self.item_s, wait_s=self.wait_s.get(key, 0.0))
        costs = replace(
            ideal_cluster(),
            all_reduce=LinearCost(self.message_s, self.element_s),
            reduce=LinearCost(self.message_s, self.element_s / 2),
            broadcast=LinearCost(self.broadcast_s, self.broadcast_element_s),
        )
        return DisturbedCluster.disturbed(costs, waiting)


@cache
def ideal_cluster() -> ClusterProfile:
    """The cluster on which plans are made: with the constants of the authors' planner."""
    return load_shipped_cluster(CLUSTER_NAME)


@cache
def plan(key: str, schedule: ScheduleConfig) -> tuple[Plan, ModelProfile]:
    """The plan of a model, and the model."""
    model = load_shipped_model(key)
    return make_plan(schedule, model, ideal_cluster()), model


def iteration_s(key: str, algorithm: str, cluster: ClusterProfile) -> float:
    """Simulated seconds of a published row; ``S-SGD`` is one, too."""
    schedule = NAMED_SCHEDULES["sgd"] if algorithm == "S-SGD" else SCHEDULES[algorithm]
    return simulated_iteration_s(*plan(key, schedule), cluster)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def fit_messages() -> tuple[float, float]:
    """Seconds per element and per factor of D-KFAC's messages, from its published FactorComm of all models."""
    keys = published.model_keys()
    models = [published.model(key) for key in keys]
    design = np.array([[m.a_elements + m.g_elements, len(m.a_dims) + len(m.g_dims)] for m in models], dtype=float)
    scale = np.array([1e9, 1e3])  # so that both coefficients are near 1
    target = np.array([published.breakdown_s(key, "D-KFAC")["FactorComm"].value for key in keys])
    element_s, item_s = nnls(design / scale, target)[0] / scale
    return _rounded(element_s), _rounded(item_s)


def fit(broadcast_element_s: float = LINE_S_PER_ELEMENT, message_s: float = 0.0, slowdown: float | None = None) -> Fit:
    """Fit the parameters; those given are not fitted.

    Raises:
        ValueError: if no slowdown makes ResNet-50's SPD-KFAC row come out.
    """
    element_s, item_s = fit_messages()
    found = Fit(element_s, item_s, message_s, 0.0, broadcast_element_s, slowdown or 0.0, {})
    found = _solve(lambda value: replace(found, broadcast_s=value), (0.0, 0.01), "MPD-KFAC")
    if slowdown is None:
        with_broadcasts = found
        found = _solve(lambda value: replace(with_broadcasts, slowdown=value), (0.0, 1.0), "SPD-KFAC")
    return _with_waiting(found, published.model_keys())


def _with_waiting(found: Fit, keys: Sequence[str]) -> Fit:
    """With what of each S-SGD row the messages do not explain."""
    bare = replace(found, wait_s={})
    wait_s = {}
    for key in keys:
        bars = published.breakdown_s(key, "D-KFAC")
        row_s = bars["FF&BP"].value + bars["GradComm"].value
        wait_s[key] = max(0.0, _rounded(row_s - iteration_s(key, "S-SGD", bare.cluster(key))))
    return replace(found, wait_s=wait_s)


def _solve(with_: Callable[[float], Fit], between: tuple[float, float], algorithm: str) -> Fit:
    """With the value for which a row of ResNet-50 comes out as published."""

    def waiting(value: float) -> Fit:
        return _with_waiting(with_(value), (FITTED_MODEL,))

    def miss_s(value: float) -> float:
        row_s = iteration_s(FITTED_MODEL, algorithm, waiting(value).cluster(FITTED_MODEL))
        return row_s - published.iteration_s(FITTED_MODEL, algorithm).value

    if miss_s(between[0]) * miss_s(between[1]) > 0:
        raise ValueError(f"nothing from {between[0]:g} to {between[1]:g} gives {FITTED_MODEL}'s {algorithm} row")
    solve: Callable[..., float] = brentq
    return waiting(_rounded(solve(miss_s, *between, xtol=1e-12)))


def fit_parts(message_s: float = 0.0) -> Fit:
    """The same parameters, fitted to parts of ResNet-50's rows instead of their totals.

    The parts are SPD-KFAC's exposed FactorComm, and the inverse phases (InverseComp and InverseComm) of MPD-KFAC and
    SPD-KFAC: three numbers for start-up and bandwidth of a broadcast and the slowdown.
    """
    element_s, item_s = fit_messages()
    of_paper = [published.breakdown_s(FITTED_MODEL, a) for a in ("MPD-KFAC", "SPD-KFAC")]
    target = [sum(bars[kind].value for kind in ("InverseComp", "InverseComm")) for bars in of_paper]
    target.append(of_paper[1]["FactorComm"].value)
    before_s = sum(of_paper[1][kind].value for kind in ("FF&BP", "GradComm", "FactorComp"))

    def of(unknowns: Iterable[float]) -> Fit:
        slowdown, start_ms, element_ns = map(float, unknowns)
        bare = Fit(element_s, item_s, message_s, 1e-3 * start_ms, 1e-9 * element_ns, slowdown, {})
        return _with_waiting(bare, (FITTED_MODEL,))

    def miss_ms(unknowns: np.ndarray[tuple[int], np.dtype[np.float64]], /) -> list[float]:
        cluster = of(unknowns).cluster(FITTED_MODEL)
        free = replace(cluster, inverse=PolynomialCost((0.0,)))
        found = []
        for algorithm in ("MPD-KFAC", "SPD-KFAC"):
            made, model = plan(FITTED_MODEL, SCHEDULES[algorithm])
            no_owners = replace(made, inverse_owner=(None,) * len(made.factors), inverse_messages=())
            before = simulated_iteration_s(no_owners, model, free)
            found.append(simulated_iteration_s(made, model, cluster) - before)
        return [1e3 * (a - b) for a, b in zip((*found, before - before_s), target, strict=True)]

    solved = least_squares(miss_ms, (0.6, 0.5, 1.0), bounds=((0, 0, 0), (1, 5, 5)), diff_step=[1e-3] * 3).x
    return _with_waiting(of([_rounded(x) for x in solved]), published.model_keys())


@dataclass(frozen=True)
class Residuals:
    """How far rows are from the published ones.

    Args:
        rows: per model and algorithm, relative error of the iteration time.
        speedups: per model, difference of SP1 and SP2.
    """

    rows: Mapping[str, Mapping[str, float]]
    speedups: Mapping[str, Mapping[str, float]]

    @property
    def predicted(self) -> list[float]:
        """Absolute relative errors of the rows that nothing was fitted to."""
        return [abs(self.rows[key][a]) for key in self.rows if key != FITTED_MODEL for a in ("MPD-KFAC", "SPD-KFAC")]

    def summary(self) -> dict[str, float]:
        """Mean and greatest error of what was predicted, and the greatest of its speed-ups."""
        ratios = [abs(d) for key, both in self.speedups.items() if key != FITTED_MODEL for d in both.values()]
        mean = sum(self.predicted) / len(self.predicted)
        return {
            "mean_error": round(mean, 4),
            "max_error": round(max(self.predicted), 4),
            "max_speedup_difference": round(max(ratios), 4),
        }


def residuals(cluster_of: Callable[[str], ClusterProfile]) -> Residuals:
    """Simulated against published, on the cluster of each model."""
    rows, speedups = {}, {}
    for key in published.model_keys():
        cluster = cluster_of(key)
        seconds = {a: iteration_s(key, a, cluster) for a in SCHEDULES}
        of_paper = {a: published.iteration_s(key, a).value for a in SCHEDULES}
        rows[key] = {a: round(seconds[a] / of_paper[a] - 1, 4) + 0.0 for a in SCHEDULES}
        speedups[key] = {
            name: round(seconds[a] / seconds["SPD-KFAC"] - of_paper[a] / of_paper["SPD-KFAC"], 4) + 0.0
            for name, a in SPEEDUPS.items()
        }
    return Residuals(rows, speedups)


def candidates() -> dict[str, Callable[[], Fit]]:
    """What was tried, by what it says: each fitted to the same rows."""
    by_code = published.linear_cost("broadcast_code_2020_12").beta_s_per_element
    own = published.linear_cost("all_reduce_final_runs")
    return {
        "costs fitted, no slowdown": lambda: fit(slowdown=0.0),
        "slowdown; broadcasts at the line's rate": fit,
        "slowdown; broadcasts at the rate in the authors' code of December 2020": lambda: fit(by_code),
        "slowdown; broadcasts at half of what their all-reduce takes": lambda: fit(own.beta_s_per_element / 2),
        "slowdown; broadcasts at half of what the fitted all-reduce takes": lambda: fit(fit_messages()[0] / 2),
        "slowdown; line's rate; 0.93 ms start-up per message, as in the authors' code": lambda: fit(
            message_s=own.alpha_s
        ),
        "slowdown; line's rate; 2.5 ms start-up per message, half of Horovod's cycle": lambda: fit(message_s=2.5e-3),
        "slowdown and broadcasts fitted to parts of the rows, not to their totals": fit_parts,
        "the same with 0.93 ms start-up per message": lambda: fit_parts(own.alpha_s),
    }


def record() -> dict[str, Any]:
    """The fit, its residuals, and those of the other candidates."""
    chosen = fit()
    found = residuals(chosen.cluster)
    tried: dict[str, Any] = {"ideal: the shipped profile": residuals(lambda key: ideal_cluster()).summary()}
    for name, candidate in candidates().items():
        of_candidate = candidate()
        tried[name] = {
            "slowdown": of_candidate.slowdown,
            "broadcast_s": of_candidate.broadcast_s,
            "broadcast_element_s": of_candidate.broadcast_element_s,
            **residuals(of_candidate.cluster).summary(),
        }
    return {
        "made_by": COMMAND,
        "fitted_to": {
            "element_s, item_s": "FactorComm of the D-KFAC rows of all models",
            "wait_s": "GradComm (the S-SGD row) of each model",
            "broadcast_s": f"{FITTED_MODEL}: the MPD-KFAC row",
            "slowdown": f"{FITTED_MODEL}: the SPD-KFAC row",
            "broadcast_element_s": "not fitted: 32 bits at 100 Gb/s",
            "message_s": "not fitted: 0, the D-KFAC rows do not tell it from item_s",
        },
        "parameters": {**vars(chosen), "wait_s": dict(chosen.wait_s)},
        "relative_error": found.rows,
        "speedup_difference": found.speedups,
        "predicted": found.summary(),
        "candidates": tried,
    }


@cache
def load() -> Fit:
    """The fit as recorded."""
    return Fit(**json.loads(PATH.read_text())["parameters"])


def write(directory: Path) -> list[Path]:
    """Write the record and the cluster's fitted profile for each model; returns the files."""
    data = record()
    paths = [directory / PATH.name]
    paths[0].write_text(json.dumps(data, indent=1) + "\n")
    chosen = Fit(**data["parameters"])
    (directory / PROFILES.name).mkdir(parents=True, exist_ok=True)
    for key in published.model_keys():
        provenance = {
            "kind": "derived",
            "name": f"{CLUSTER_NAME} with interference, for {key}",
            "hardware": ideal_cluster().provenance["hardware"],
            "made_by": COMMAND,
            "fitted_to": data["fitted_to"],
            "inverse": ideal_cluster().provenance["inverse"],
        }
        paths.append(directory / PROFILES.name / f"{CLUSTER_NAME}-{key}.json")
        replace(chosen.cluster(key), provenance=provenance).save(paths[-1])
    return paths


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit what the simulation of the paper's cluster leaves out; write the fit with its residuals, and profiles."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=main.__doc__)
    parser.add_argument("--out", type=Path, default=PATH.parent, help="folder (default: the one that the figures use)")
    for path in write(parser.parse_args(arguments).out):
        print(path)  # noqa: T201


if __name__ == "__main__":
    main()
