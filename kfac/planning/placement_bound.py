"""A proven lower bound on how early any inverse placement can finish."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kfac.planning.checks import number
from kfac.planning.costs import Size
from kfac.planning.placement_model import InverseCosts
from kfac.planning.profiles import ClusterProfile

_SOLVER_TOLERANCE = 1e-6
"""HiGHS' feasibility and integrality tolerance: the bound is lowered by what it may err by."""

_MOST_LEVELS = 64
_MOST_ENTRIES = 64_000
"""Cost levels that the program looks at, and levels times kinds of factors: the solver looks at its clock only between
steps whose length grows with them."""


def placement_lower_bound_s(
    dims: Sequence[Size], world_size: int, cluster: ClusterProfile, *, time_limit_s: float = 30.0
) -> float:
    """Seconds that no placement on one broadcast channel can beat, whatever its owners and orders.

    The optimum of a mixed-integer program. With T the finish, c and b the seconds to invert and to broadcast a factor,
    and for every cost level t that occurs (or evenly chosen ones where there are very many, which leaves requirements
    out and so gives a bound as well):

    1. work: the P ranks together compute at most P T seconds; a factor that every rank inverts costs P c;
    2. each factor: c <= T (that c + b <= T where it is broadcast follows from 3);
    3. late broadcasts: those of factors with c >= t cannot start before t and queue on the channel;
    4. late ranks: a rank that inverts such a factor for the others also inverts all factors that every rank inverts.

    Factors of equal dimension are interchangeable, so the integer unknowns are counts per dimension. The bound is never
    below the two that need no solver: all work spread evenly over the ranks, and the dearest inversion.

    Args:
        dims: dimension of every factor, or (blocks, dimension) of a block-diagonal one.
        world_size: number of ranks; it overrides the profile's.
        cluster: the cost models.
        time_limit_s: the solver stops then; what it has proven by then is returned and is still a bound.

    Raises:
        ValueError: for impossible numbers, or costs that are no numbers of seconds.
    """
    number("time_limit_s", time_limit_s)
    cluster = cluster.at(world_size)
    costs = InverseCosts.of(dims, cluster)
    total = sum(costs.invert_s)
    if world_size == 1 or total == 0:
        return total
    simple = max(*costs.invert_s, total / world_size)
    # In units of a thousandth of the all-local time, so that the solver's absolute tolerances are relative ones.
    unit = total / 1000
    kinds = [
        _Kind(invert_s / unit, send_s / unit, count)
        for (invert_s, send_s), count in sorted(Counter(zip(costs.invert_s, costs.broadcast_s, strict=True)).items())
    ]
    proven = _proven(kinds, world_size, time_limit_s) * unit * (1 - _SOLVER_TOLERANCE)
    return min(max(simple, proven), total)  # every rank inverting everything takes the total


class _Kind(NamedTuple):
    """Factors of equal cost."""

    invert: float
    send: float
    factors: int


def _proven(kinds: Sequence[_Kind], world_size: int, time_limit_s: float) -> float:
    """What the solver proves about T in time; 0 if nothing."""
    import numpy as np  # here, not above: planning starts without SciPy
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    k = len(kinds)
    # A level is the index of its cheapest kind. Evenly spaced, with the cheapest and the dearest kind among them.
    count = min(k, _MOST_LEVELS, max(2, _MOST_ENTRIES // k))
    levels = sorted({round(x) for x in np.linspace(0, k - 1, count)})
    # Unknowns: T, per kind how many are broadcast, then per level whether a factor as dear as it is.
    width = 1 + k + len(levels)
    total = sum(kind.invert * kind.factors for kind in kinds)
    rows: list[dict[int, float]] = []
    floor: list[float] = []

    def require(row: dict[int, float], at_least: float) -> None:
        rows.append(row)
        floor.append(at_least)

    work = {1 + v: (world_size - 1) * kind.invert for v, kind in enumerate(kinds)}
    require({0: float(world_size), **work}, world_size * total)
    common = {1 + w: kind.invert for w, kind in enumerate(kinds)}
    for number_of_level, (level, following) in enumerate(zip(levels, [*levels[1:], k], strict=True)):
        present = 1 + k + number_of_level
        for v in range(level, following):
            require({present: float(kinds[v].factors), 1 + v: -1.0}, 0.0)
        if following < k:
            require({present: 1.0, present + 1: -1.0}, 0.0)
        invert = kinds[level].invert
        require({0: 1.0, present: -invert, **{1 + w: -kinds[w].send for w in range(level, k)}}, 0.0)
        require({0: 1.0, present: -invert, **common}, total)
    starts = np.cumsum([0, *map(len, rows)])
    matrix = csr_array(
        ([x for row in rows for x in row.values()], [i for row in rows for i in row], starts), shape=(len(rows), width)
    )
    solution = milp(
        c=np.eye(1, width)[0],
        constraints=LinearConstraint(matrix, lb=np.array(floor)),
        integrality=np.array([0] + [1] * (width - 1)),
        bounds=Bounds(
            np.array([kinds[-1].invert] + [0.0] * (width - 1)),
            np.array([np.inf, *(float(kind.factors) for kind in kinds), *([1.0] * len(levels))]),
        ),
        options={"mip_rel_gap": 1e-4, "time_limit": time_limit_s},
    )
    proven = solution.mip_dual_bound
    return float(proven) if proven is not None and np.isfinite(proven) else 0.0
