"""What came of the comparison, as tables, JSON and a figure."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from analysis.statistics import spread
from benchmarks.optimisation.comparison import (
    EVALUATION_SEEDS,
    PILOT_SEEDS,
    PILOT_SHARE,
    SEARCH_SEED,
    Comparison,
    Search,
    Setting,
)
from benchmarks.optimisation.contenders import CONTENDERS
from benchmarks.optimisation.trials import Job, Outcome
from experiments.provenance import code_identity, environment_facts
from paper_figures import convergence
from paper_figures.style import PNG_DPI, paper_style

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
PICTURE = """![Metric against steps](images/optimisation.png)

*The evaluations of each row: median of three seeds, shaded from the least to the greatest. A line ends where the first
of its seeds meets the target (dotted), or with the budget.*"""
KFAC_ROWS = ("kfac-1", "kfac-10")


def number(value: float) -> str:
    """A number of steps or seconds; a miss is infinite."""
    if math.isinf(value):
        return "∞"
    return f"{value:.0f}" if value == int(value) else f"{value:.3g}"


def tables(comparisons: Sequence[Comparison], setting: Setting) -> str:
    """The generated part of the page."""
    parts = [_facts(setting), PICTURE]
    for comparison in comparisons:
        parts += [f"### {comparison.workload.title}", _target(comparison), _results(comparison), _tuned(comparison)]
    parts += [
        "### Goals",
        _goals(comparisons),
        "### Search spaces",
        _spaces([s.contender for s in comparisons[0].searches]),
    ]
    return "\n\n".join(parts)


def _facts(setting: Setting) -> str:
    facts, code = environment_facts({}), code_identity()[0]
    commit = (
        f"commit {code['commit'][:7]}{' with changes' if code['dirty'] else ''}" if "commit" in code else "no checkout"
    )
    return (
        f"{setting.trials} trials for each row and workload, {setting.processes} at a time with one thread each, on "
        f"{facts['cpus']} cores of {facts['cpu']}; PyTorch {facts['packages']['torch']}, Python {facts['python']}; "
        f"{date.today()}, {commit}. Every trial: [optimisation.json](optimisation.json)."
    )


def _target(comparison: Comparison) -> str:
    workload = comparison.workload
    reached = " and ".join(f"{CONTENDERS[name].title} {value:.4g}" for name, value in comparison.reached.items())
    sign = "≥" if workload.higher else "≤"
    return (
        f"Target {sign} **{comparison.target:g}**: the worse of what the pilot's best trials reached in "
        f"{round(workload.budget * PILOT_SHARE)} steps, {reached}. Budget {workload.budget} steps, evaluated every "
        f"{workload.every}."
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _results(comparison: Comparison) -> str:
    sgd = next((s.median_steps for s in comparison.searches if s.contender == "sgd"), math.nan)
    fewest = min(s.median_steps for s in comparison.searches)
    fastest = min(comparison.seconds_to_target(s) for s in comparison.searches)
    rows = []
    for search in comparison.searches:
        seconds = spread(comparison.seconds[search.contender])
        total = comparison.seconds_to_target(search)
        met = sum(outcome.met is not None for _, outcome in search.trials)
        rows.append(
            (
                CONTENDERS[search.contender].title,
                ", ".join(map(number, search.steps)),
                _bold(number(search.median_steps), search.median_steps == fewest),
                f"{search.median_steps / sgd:.2f}" if math.isfinite(search.median_steps / sgd) else "–",
                f"{1e3 * seconds.median:.1f} ({1e3 * seconds.q25:.1f}-{1e3 * seconds.q75:.1f})",
                _bold(number(total), total == fastest),
                f"{met} of {len(search.trials)}",
            )
        )
    seeds = ", ".join(map(str, EVALUATION_SEEDS))
    head = (
        "",
        f"steps, seeds {seeds}",
        "median",
        "/ SGD's",
        "ms per step (quartiles)",
        "seconds",
        "trials that met it",
    )
    return _table(head, rows)


def _bold(text: str, best: bool) -> str:
    return f"**{text}**" if best and text != "∞" else text


def _tuned(comparison: Comparison) -> str:
    rows = [
        (
            CONTENDERS[search.contender].title,
            ", ".join(f"{name} {value:.3g}" for name, value in search.best.hyperparameters.items()),
            number(next(outcome for job, outcome in search.trials if job == search.best).steps),
        )
        for search in comparison.searches
    ]
    return _table(("", "best trial", f"its steps (seed {SEARCH_SEED})"), rows)


def goals(comparison: Comparison) -> dict[str, bool]:
    """Which of the goals that K-FAC had on a workload are met, by the better of its rows."""
    by_name = {search.contender: search for search in comparison.searches}
    ours = [by_name[name] for name in KFAC_ROWS if name in by_name]
    others = [search for name, search in by_name.items() if name not in KFAC_ROWS]
    steps = min((search.median_steps for search in ours), default=math.inf)
    seconds = min(map(comparison.seconds_to_target, ours), default=math.inf)
    sgd = by_name["sgd"].median_steps if "sgd" in by_name else math.nan
    return {
        "fewest steps": all(steps < search.median_steps for search in others),
        "at most half of SGD's steps": steps <= sgd / 2 and math.isfinite(steps),
        "least seconds": all(seconds < comparison.seconds_to_target(search) for search in others),
    }


def _goals(comparisons: Sequence[Comparison]) -> str:
    met = {comparison.workload.name: goals(comparison) for comparison in comparisons}
    names = list(next(iter(met.values())))
    rows = [(name, *("yes" if met[w][name] else "no" for w in met)) for name in names]
    return _table(("K-FAC, at its better interval", *met), rows)


def _spaces(names: Sequence[str]) -> str:
    rows = [
        (
            CONTENDERS[name].title,
            ", ".join(f"{key} {low:g}-{high:g}" for key, (low, high) in CONTENDERS[name].space.items()),
        )
        for name in names
    ]
    text = "All on a logarithmic scale."
    return text + "\n\n" + _table(("", "hyper-parameters"), rows)


def to_dict(comparisons: Sequence[Comparison], setting: Setting) -> dict[str, Any]:
    """Every trial; curves only of the evaluations."""
    facts = environment_facts({})
    return {
        "code": code_identity()[0],
        "environment": {key: facts[key] for key in ("python", "packages", "platform", "cpu", "cpus")},
        "seeds": {"pilot": PILOT_SEEDS, "search": SEARCH_SEED, "evaluation": EVALUATION_SEEDS},
        "trials": setting.trials,
        "workloads": {c.workload.name: _workload_dict(c) for c in comparisons},
    }


def _workload_dict(comparison: Comparison) -> dict[str, Any]:
    workload = comparison.workload
    return {
        "title": workload.title,
        "target": comparison.target,
        "pilot": {
            "reached": comparison.reached,
            "runs": [
                {"contender": job.contender, "seed": job.seed, **_trial_dict(comparison, job, outcome)}
                for job, outcome in comparison.pilot
            ],
        },
        "contenders": {search.contender: _search_dict(comparison, search) for search in comparison.searches},
    }


def _search_dict(comparison: Comparison, search: Search) -> dict[str, Any]:
    return {
        "trials": [_trial_dict(comparison, job, outcome) for job, outcome in search.trials],
        "best": search.best.hyperparameters,
        "evaluations": [
            {"seed": seed, "steps": outcome.met, "diverged": outcome.diverged, "curve": outcome.curve}
            for seed, outcome in zip(EVALUATION_SEEDS, search.evaluations, strict=True)
        ],
        "seconds_per_step": [float(f"{value:.4g}") for value in comparison.seconds[search.contender]],
    }


def _trial_dict(comparison: Comparison, job: Job, outcome: Outcome) -> dict[str, Any]:
    best = outcome.best(comparison.workload)
    return {
        "hyperparameters": job.hyperparameters,
        "steps": outcome.met,
        "best": best if math.isfinite(best) else None,
        "diverged": outcome.diverged,
    }


def write(comparisons: Sequence[Comparison], setting: Setting, folder: Path) -> list[Path]:
    """Into ``optimisation.md`` between its markers (or a new file), ``optimisation.json`` and a picture.

    Returns:
        the written files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    page, data = folder / "optimisation.md", folder / "optimisation.json"
    text = page.read_text() if page.exists() else f"{BEGIN}\n{END}\n"
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    page.write_text(f"{head}{BEGIN}\n\n{tables(comparisons, setting)}\n\n{END}{tail}")
    content = json.loads(json.dumps(to_dict(comparisons, setting)))
    data.write_text(json.dumps(content, indent=1) + "\n")
    picture = folder / "images" / "optimisation.png"
    picture.parent.mkdir(exist_ok=True)
    with paper_style():
        convergence.draw(content["workloads"], len(EVALUATION_SEEDS)).savefig(
            picture, dpi=PNG_DPI, metadata={"Software": None}
        )
    return [page, data, picture]
