"""Measuring one part: all variants by turns on the same links, kfac-pytorch in processes of its own between them."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.netns import PORT, Network
from benchmarks.ranks import Ranks
from benchmarks.speed.limits import limits, part_bound_s
from benchmarks.speed.parts import Part
from benchmarks.speed.variants import AUTO, BASELINE, KAISA
from experiments.timeline_view import write_png
from kfac.planning import ClusterProfile, ModelProfile, Plan
from kfac.timeline import Timeline

CALIBRATION = 3
"""Iterations of the baseline that a rate is solved from."""
CLOSE = 0.03
"""How near the ratio of communication to computing must come."""
REPEATS = 3
"""Of each collective and inverse that is timed."""
HOPELESS = 1.5
"""Times the quickest strategy's iteration."""
_TIMEOUT_S = 600.0


class UnlikeLayersError(RuntimeError):
    """The two K-FACs do not precondition the same layers."""


def measure(
    part: Part, network: Network, checkout: Path | None, pictures: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """The result of a part; draws every variant's last iteration.

    Args:
        part: what to measure.
        network: as many hosts as it has workers.
        checkout: of kfac-pytorch; None: it is not measured.
        pictures: a folder.
        say: called with what is being done.

    Raises:
        NetworkError: if a rank fails.
        UnlikeLayersError: if kfac-pytorch preconditions other layers than this project.
    """
    load = [os.getloadavg()[0]]
    network.limit(None)
    with ExitStack() as stack:
        python = [sys.executable, "-m"]
        workload = ["--workload", part.workload]
        cpu = {"DS_ACCELERATOR": "cpu"}
        ours = stack.enter_context(Ranks(network, [*python, "benchmarks.speed.worker", *workload], environment=cpu))
        theirs: Ranks | None = None
        if checkout is not None:
            command = [*python, "benchmarks.speed.kaisa", *workload, "--checkout", str(checkout.resolve())]
            theirs = stack.enter_context(Ranks(network, command, environment=cpu, port=PORT + 1))
        layers = ours.ask("layers", _TIMEOUT_S)[0]
        link = set_rate(ours, network, part.ratio, say)
        model = ours.ask("model")[0]
        cluster = ours.ask("cluster", _TIMEOUT_S, repeats=REPEATS)[0]
        say("planning and warming up")
        plans = ours.ask("plan", _TIMEOUT_S, variants=part.variants, model=model, cluster=cluster)[0]
        decided: dict[str, Any] = {}
        if AUTO in part.variants:
            say("auto: planning anew, plans taking turns")
            decided = ours.ask("decide", 2 * _TIMEOUT_S, variant=AUTO, turns=part.auto_turns)[0]
            plans[AUTO] = decided["plan"]
        for name in part.variants:
            turn(ours, part.iterations, variant=name)
        players: dict[str, tuple[Ranks, dict[str, str]]] = {v: (ours, {"variant": v}) for v in part.variants}
        kaisa: dict[str, Any] | None = None
        if theirs:
            say("trying KAISA's strategies")
            kaisa = best_strategy(theirs, part, layers)
            players[KAISA] = (theirs, {"strategy": kaisa["best"]})
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in players}
        for number in range(part.rounds):
            say(f"round {number + 1} of {part.rounds}")
            for name in rotated(list(players), number):
                ranks, who = players[name]
                turns[name].append(turn(ranks, part.iterations, **who))
        measured_model = ours.ask("model")[0]
        draw(ours, part, pictures)
    profiles = ModelProfile.from_dict(measured_model), ClusterProfile.from_dict(cluster)
    result = {name: summary(rows) for name, rows in turns.items()}
    for name, plan in plans.items():
        value = Plan.from_dict(plan)
        result[name] |= {"schedule": plan["schedule"], "plan": str(value), **limits(value, *profiles)}
    return {
        "key": part.key(),
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "load": [*load, os.getloadavg()[0]],
        "link": link,
        "bound_s": part_bound_s(*profiles),
        "kaisa": kaisa,
        "auto": {key: decided[key] for key in ("decision", "said") if key in decided},
        "variants": result,
        "model_profile": measured_model,
        "cluster_profile": cluster,
        "plans": plans,
    }


def rotated(names: list[str], number: int) -> list[str]:
    """The order of a round: everyone comes first in one of them."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def turn(ranks: Ranks, iterations: int, **who: str) -> dict[str, Any]:
    """One turn of a variant: of the slowest rank the seconds, of all ranks the mean of everything else."""
    answers = ranks.ask("turn", _TIMEOUT_S, iterations=iterations, **who)
    result: dict[str, Any] = {"seconds": max(answer["seconds"] for answer in answers)}
    for key in answers[0]:
        values = [answer[key] for answer in answers]
        if isinstance(values[0], dict):
            result[key] = {kind: fmean(value[kind] for value in values) for kind in values[0]}
        elif key != "seconds":
            result[key] = fmean(values)
    return result


def summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a variant's turns the seconds of each, and medians over them of everything else."""
    result: dict[str, Any] = {"seconds": [one["seconds"] for one in turns]}
    for key, value in turns[0].items():
        if isinstance(value, dict):
            result[key] = {kind: median(one[key][kind] for one in turns) for kind in value}
        elif key != "seconds":
            result[key] = median(one[key] for one in turns)
    return result


# ---------------------------------------------------------------------- the link


def computing_s(busy_s: Mapping[str, float]) -> float:
    """Forward and backward pass and statistics, whether hidden or not."""
    return busy_s["FF"] + busy_s["BP"] + busy_s["FactorComp"]


def channel_ratio(busy_s: Mapping[str, float]) -> float:
    """Time of the factors' and gradients' messages over :func:`computing_s`."""
    return (busy_s["FactorComm"] + busy_s["GradComm"]) / computing_s(busy_s)


def rate_for(sent: float, computing: float, ratio: float) -> float:
    """Megabits a second at which sending so many bytes takes ``ratio`` times the computing time."""
    return sent * 8 / (ratio * computing) / 1e6


def set_rate(ours: Ranks, network: Network, ratio: float | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Limit the links so that the baseline's communication takes ``ratio`` times its computing.

    The rate follows from its seconds and bytes on unlimited links, and is corrected by what it takes on limited ones.
    """
    say("measuring the ratio of communication to computing")

    def baseline() -> dict[str, Any]:
        return summary([turn(ours, 1, variant=BASELINE) for _ in range(CALIBRATION)])

    turn(ours, 2, variant=BASELINE)
    found = baseline()
    unlimited = channel_ratio(found["busy_s"])
    if ratio is None or unlimited >= ratio:
        return {"rate_mbit_s": None, "wanted_ratio": ratio, "unlimited_ratio": unlimited}
    rate = rate_for(found["sent_bytes"], computing_s(found["busy_s"]), ratio)
    for _ in range(2):
        network.limit(rate)
        reached = channel_ratio(baseline()["busy_s"])
        if abs(reached / ratio - 1) <= CLOSE:
            break
        rate *= reached / ratio
    network.limit(rate)
    say(f"links limited to {rate:.0f} Mbit/s")
    return {"rate_mbit_s": rate, "wanted_ratio": ratio, "unlimited_ratio": unlimited}


# ---------------------------------------------------------------------- kfac-pytorch


def strategies(workers: int) -> dict[str, dict[str, Any]]:
    """KAISA's strategies by name.

    Who preconditions a layer (all ranks, one, half of them), whole factors or triangles, in buckets of 25 MB (its
    default) or each alone.
    """
    fractions = {"COMM_OPT": 1.0, "MEM_OPT": 1 / workers}
    if workers > 2:
        fractions["HYBRID_OPT"] = 0.5
    return {
        f"{name}{', triangles' if symmetric else ''}{', buckets' if bucket_mb else ''}": {
            "grad_worker_fraction": fraction,
            "symmetry_aware": symmetric,
            "allreduce_bucket_cap_mb": bucket_mb,
        }
        for name, fraction in fractions.items()
        for symmetric in (False, True)
        for bucket_mb in (25, 0)
    }


def best_strategy(theirs: Ranks, part: Part, layers: Iterable[str]) -> dict[str, Any]:
    """Try all strategies; the quickest of all is built when this returns.

    One whose first iteration takes much longer than the quickest's gets no second.
    """
    tried: dict[str, float] = {}
    best = ""

    def attempt(name: str, options: Mapping[str, Any]) -> None:
        nonlocal best
        covered = theirs.ask("build", _TIMEOUT_S, strategy=name, options=options)[0]
        if covered != list(layers):
            different = sorted(set(covered) ^ set(layers))
            raise UnlikeLayersError(f"only one of the K-FACs preconditions {', '.join(different)}")
        tried[name] = turn(theirs, 1, strategy=name)["seconds"]
        if not best or tried[name] < HOPELESS * tried[best]:
            tried[name] = turn(theirs, part.iterations, strategy=name)["seconds"]
        worse = name if best and tried[name] >= tried[best] else best
        best = best if worse == name else name
        if worse:
            theirs.ask("forget", strategy=worse)

    for name, options in strategies(part.workers).items():
        attempt(name, options)
    return {"best": best, "tried_s": tried}


# ---------------------------------------------------------------------- pictures


def draw(ours: Ranks, part: Part, pictures: Path) -> None:
    """Every variant's last recorded iteration of all ranks, one picture and one trace each."""
    pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        ours.ask("traces", folder=folder)
        for name in part.variants:
            ranks = [Timeline.from_chrome_trace(path) for path in sorted(Path(folder).glob(f"{name}.rank*.json"))]
            merged = Timeline.merge(ranks)
            write_png(merged, pictures / f"{name}.png", f"{name}: {part.title}, measured")
            merged.to_chrome_trace(pictures / f"{name}.trace.json")
