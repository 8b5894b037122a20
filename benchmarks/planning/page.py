"""The tables of ``docs/scheduling.md``, from the data that the command computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.planning.fusions import CLUSTERS, DRAWS, NOISE
from benchmarks.planning.placements import RULES, gap
from benchmarks.planning.scale import crossings
from paper_figures import published

SHOWN_SIZES = (4, 64, 1024, 16384)


def _table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"| --- |{' ---: |' * (len(head) - 1)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def fusion_tables(data: Mapping[str, Any]) -> Iterator[str]:
    """Tails under every rule, what merging kinds would gain, and the price of noise."""
    columns = {
        "none": "none",
        "threshold": "threshold",
        "greedy": "greedy",
        "kinds apart": "optimal, kinds apart",
        "optimal": "**optimal**",
        "A with G": "A may join G",
        "G with gradients": "G may join gradients",
        "all in one": "all may join",
    }

    def rows() -> Iterator[Sequence[str]]:
        for row in data["fusion"]:
            yield [
                f"{row['model']}, {CLUSTERS[row['cluster']]}",
                *(f"{1e3 * row['tail_s'][key]:.1f}" for key in columns),
                *(f"{row['mean_regret'][rule]:.1%}" for rule in ("greedy", "optimal")),
            ]

    yield from _table(["tail in ms", *columns.values(), "greedy, noise", "optimal, noise"], rows())
    greedy = data["greedy_on_random_instances"]
    yield (
        "Tail: from the end of the backward pass to the last arrival, simulated. Noise: each layer's seconds are off "
        f"by up to {NOISE:.0%}; how much later than the optimum for the disturbed seconds the last message arrives, "
        f"mean of {DRAWS} draws. On {greedy['instances']:,} random instances of 2 to 12 tensors greedy is later than "
        f"the optimum in {greedy['worse'] / greedy['instances']:.1%}, by {greedy['worst']:.1%} at most."
    )


def placement_tables(data: Mapping[str, Any]) -> Iterator[str]:
    """The distances to the bound: median and largest over the world sizes."""
    kinds: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in data["placement"]:
        kinds.setdefault((row["model"], row["inverse"]), []).append(row)

    def cell(rows: Sequence[Mapping[str, Any]], rule: str) -> str:
        gaps = [gap(row, rule) for row in rows]
        return f"{median(gaps):.1%} / {max(gaps):.1%}"

    def body() -> Iterator[Sequence[str]]:
        for (model, inverse), rows in kinds.items():
            yield [f"{model}, {inverse}", *(cell(rows, rule) for rule in RULES)]
        yield ["**all**", *(f"**{cell(data['placement'], rule)}**" for rule in RULES)]

    yield from _table(["above the bound: median / most", *RULES], body())
    sizes = sorted({row["world_size"] for row in data["placement"]})
    slowest = max(row["planning_s"] for row in data["placement"])
    yield (
        f"{len(data['placement'])} instances; each line is over the world sizes {', '.join(map(str, sizes))}. "
        f"The search took at most {slowest:.2f} s of processor time."
    )


def scale_tables(data: Mapping[str, Any]) -> Iterator[str]:
    """Seconds at some sizes, and where schedules overtake each other."""
    first = data["scaling"][0]
    names = list(first["iteration_s"])

    def rows() -> Iterator[Sequence[str]]:
        for curve in data["scaling"]:
            for size in SHOWN_SIZES:
                at = curve["world_sizes"].index(size)
                yield [
                    f"{published.model(curve['model']).name}, {curve['latency']}, {size:,}",
                    *(f"{curve['iteration_s'][name][at]:.3f}" for name in names),
                ]

    yield from _table(["seconds at ranks", *names], rows())
    yield "Crossings (ranks, interpolated), without plain SGD, which is always fastest:"
    yield ""
    for curve in data["scaling"]:
        found = [
            f"{c['world_size']:,} ({c['faster_beyond']} before {c['slower_beyond']})"
            for c in crossings(curve["world_sizes"], curve["iteration_s"])
        ]
        yield f"* {published.model(curve['model']).name}, {curve['latency']}: {'; '.join(found) or 'none'}"


TABLES = {"fusion": fusion_tables, "placement": placement_tables, "scaling": scale_tables}


def with_tables(text: str, data: Mapping[str, Any]) -> str:
    """The page with its tables made anew: each stands between ``<!-- name: begin -->`` and ``<!-- name: end -->``."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, rest = text.split(begin)
        after = rest.split(end)[1]
        text = "\n".join([before + begin, *table(data), end + after])
    return text
