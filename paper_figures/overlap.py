"""Overlap table: how much of the factors' communication SPD-KFAC hides, of what could be hidden."""

from __future__ import annotations

from analysis.tables import Cell, Column, Table
from paper_figures import interference, published, simulated
from paper_figures.interference import AS_RUN, SCHEDULES
from paper_figures.item import Context, Made, Provenance, write_table
from paper_figures.measured import add_runs, measured

NAME = "overlap"
COLUMNS = (
    Column("model", align="left"),
    Column("tag", align="left"),
    Column("D-KFAC [ms]", ".1f", group="exposed FactorComm"),
    Column("SPD-KFAC [ms]", ".1f", group="exposed FactorComm"),
    Column("hidden", ".0%"),
    Column("possible (derived)", ".0%"),
    Column("of possible (derived)", ".0%"),
)


def possible(key: str, sent_s: float, gradients_s: float) -> float:
    """The most of the factors' messages that computing could hide, if the two did not disturb each other.

    One channel carries factors and gradients. It cannot start before the first A is there, and only what it carries
    until the backward pass has ended is hidden; gradients take of that what they need.

    Args:
        key: the model.
        sent_s: seconds of the factors' messages.
        gradients_s: seconds of the gradients' messages.
    """
    layers = simulated.model(key).layers
    computing_s = sum(x.forward_s + x.backward_s + x.a_statistics_s + x.g_statistics_s for x in layers)
    window_s = computing_s - layers[0].forward_s - layers[0].a_statistics_s
    return min(1.0, max(0.0, window_s - gradients_s) / sent_s)


def table(context: Context) -> tuple[Table, Provenance, tuple[str, ...]]:
    """One row per model and tag, then one per measured schedule."""
    provenance = Provenance(NAME)
    rows: list[tuple[Cell, ...]] = []
    for key in published.model_keys():
        for tag in ("published", "simulated with interference", "simulated ideally"):
            rows.append(_row(key, tag, provenance))
    groups, warnings = measured(context.runs)
    add_runs(provenance, groups)
    for group in groups:
        exposed = group.breakdown_s().get("FactorComm", 0.0)
        hidden = [run.hidden_s["FactorComm"] for run in group.runs if "FactorComm" in run.hidden_s]
        if not hidden or group.run.schedule not in ("spdkfac", "auto"):
            continue
        share = (mean := sum(hidden) / len(hidden)) / (mean + exposed)
        name = f"{group.run.model}, {group.run.schedule}, {group.run.world_size} ranks"
        provenance.add(f"{group.label}/measured/SPD-KFAC", exposed, "measured", **group.origin())
        provenance.add(f"{group.label}/measured/hidden", share, "measured", **group.origin())
        rows.append((name, "measured", None, 1e3 * exposed, share, None, None))
    notes = (
        "hidden: the share of D-KFAC's exposed FactorComm that SPD-KFAC, with the paper's threshold, does not expose; "
        "measured: of what an iteration's own timeline has.",
        "possible: if computing and communication did not disturb each other: what one channel can carry of the "
        "factors' messages, beside the gradients', between the first A factor and the end of the backward pass. Of a "
        "row's own seconds; gradients as their elements take at the row's seconds per element. Derived: the passes and "
        "statistics are the layers' of the model's profile, in which published seconds are spread over the layers.",
    )
    return Table("Factor communication hidden by SPD-KFAC", COLUMNS, tuple(rows), notes), provenance, tuple(warnings)


def _row(key: str, tag: str, provenance: Provenance) -> tuple[Cell, ...]:
    path = f"{key}/{tag}"
    if tag == "published":
        numbers = [published.breakdown_s(key, a)["FactorComm"] for a in ("D-KFAC", "SPD-KFAC")]
        d_s, spd_s = (number.value for number in numbers)
        for algorithm, number in zip(("D-KFAC", "SPD-KFAC"), numbers, strict=True):
            provenance.add(f"{path}/{algorithm}", number.value, number.status, **number.origin())
    else:
        fitted = tag.endswith("interference")
        d_s, spd_s = (
            simulated.simulated(key, s, fitted).exposed_s["FactorComm"] for s in (SCHEDULES["D-KFAC"], AS_RUN)
        )
        for algorithm, value, schedule in (("D-KFAC", d_s, SCHEDULES["D-KFAC"]), ("SPD-KFAC", spd_s, AS_RUN)):
            origin = simulated.add_input(provenance, key, algorithm, schedule, fitted)
            provenance.add(f"{path}/{algorithm}", value, "simulated", input=origin)
    counts = published.model(key)
    gradients_s = d_s * counts.parameters / (counts.a_elements + counts.g_elements)
    most, hidden = possible(key, d_s, gradients_s), 1 - spd_s / d_s
    of = [f"{path}/{a}" for a in ("SPD-KFAC", "D-KFAC")]
    own = tag.partition(" ")[0]
    provenance.add(f"{path}/exposed", spd_s / d_s, own, ratio_of=of)
    provenance.add(f"{path}/hidden", hidden, own, one_minus=f"{path}/exposed")
    profile = f"model profile {key}"
    provenance.inputs[profile] = {
        "file": f"kfac/planning/shipped/models/{key}.json",
        "function": "paper_figures.overlap.possible",
        "arguments": "seconds of D-KFAC in the same row; gradients: times parameters / elements of all factors",
    }
    provenance.add(f"{path}/possible", most, "derived", input=profile)
    shares = [f"{path}/{name}" for name in ("hidden", "possible")]
    provenance.add(f"{path}/of possible", hidden / most, "derived", ratio_of=shares)
    return (published.model(key).name, tag, 1e3 * d_s, 1e3 * spd_s, hidden, most, hidden / most)


def make(context: Context) -> Made:
    """Write the table."""
    made_table, provenance, warnings = table(context)
    provenance.inputs["interference"] = f"paper_figures/{interference.PATH.name}, by {interference.COMMAND}"
    made = write_table(context, made_table, provenance)
    return Made(made.paths, made.text, warnings)
