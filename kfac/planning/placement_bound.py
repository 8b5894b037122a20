"""A proven lower bound on how early any inverse placement can finish."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kfac.planning.placement_model import InverseCosts
from kfac.planning.profiles import ClusterProfile

_SOLVER_TOLERANCE = 1e-6
"""HiGHS' feasibility and integrality tolerance: the bound is lowered by what it may err by."""


def placement_lower_bound_s(
    dims: Sequence[int], world_size: int, cluster: ClusterProfile, *, time_limit_s: float = 30.0
) -> float:
    """Seconds that no placement on one broadcast channel can beat, whatever its owners and orders.

    The optimum of a mixed-integer program. With T the finish, c and b the seconds to invert and to broadcast a factor,
    and for every cost level t that occurs:

    1. work: the P ranks together compute at most P T seconds; a factor that every rank inverts costs P c;
    2. each factor: c <= T (that c + b <= T where it is broadcast follows from 3);
    3. late broadcasts: those of factors with c >= t cannot start before t and queue on the channel;
    4. late ranks: a rank that inverts such a factor for the others also inverts all factors that every rank inverts.

    Factors of equal dimension are interchangeable, so the integer unknowns are counts per dimension.

    Args:
        dims: dimension of every factor.
        world_size: number of ranks; it overrides the profile's.
        cluster: the cost models.
        time_limit_s: the solver stops then; what it has proven by then is returned and is still a bound.
    """
    import numpy as np  # here, not above: planning starts without SciPy
    from scipy.optimize import Bounds, LinearConstraint, milp

    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    costs = InverseCosts.of(dims, cluster.at(world_size))
    total = sum(costs.invert_s)
    if world_size == 1 or total == 0:
        return total
    kinds = sorted(Counter(zip(costs.invert_s, costs.broadcast_s, strict=True)).items())
    # In units of a thousandth of the all-local time, so that the solver's absolute tolerances are relative ones.
    unit = total / 1000
    invert = [c / unit for (c, _), _ in kinds]
    send = [b / unit for (_, b), _ in kinds]
    count = [m for _, m in kinds]
    k = len(kinds)
    # Unknowns: T, then per kind how many are broadcast, then per kind whether a factor of it or of a dearer kind is.
    width = 1 + 2 * k
    rows: list[list[float]] = []
    floor: list[float] = []

    def require(row: list[float], at_least: float) -> None:
        rows.append(row)
        floor.append(at_least)

    def blank() -> list[float]:
        row = [0.0] * width
        row[0] = 1.0
        return row

    work = blank()
    work[0] = float(world_size)
    for v in range(k):
        work[1 + v] = (world_size - 1) * invert[v]
    require(work, world_size * sum(c * m for c, m in zip(invert, count, strict=True)))
    for v in range(k):
        present, late, ranks = 1 + k + v, blank(), blank()
        # z_v = 1 where any factor as dear as kind v is broadcast.
        implied = [0.0] * width
        implied[present], implied[1 + v] = float(count[v]), -1.0
        require(implied, 0.0)
        if v + 1 < k:
            chain = [0.0] * width
            chain[present], chain[present + 1] = 1.0, -1.0
            require(chain, 0.0)
        late[present] = ranks[present] = -invert[v]
        for w in range(v, k):
            late[1 + w] = -send[w]
        require(late, 0.0)
        for w in range(k):
            ranks[1 + w] = invert[w]
        require(ranks, sum(c * m for c, m in zip(invert, count, strict=True)))
    solution = milp(
        c=np.eye(width)[0],
        constraints=LinearConstraint(np.array(rows), lb=np.array(floor)),
        integrality=np.array([0] + [1] * (2 * k)),
        bounds=Bounds(
            np.array([max(invert)] + [0.0] * (2 * k)),
            np.array([np.inf, *map(float, count), *([1.0] * k)]),
        ),
        options={"mip_rel_gap": 1e-4, "time_limit": time_limit_s},
    )
    proven = solution.mip_dual_bound
    if proven is None or not np.isfinite(proven):
        proven = max(invert)  # nothing proven in time: the dearest inverse has to be computed somewhere
    return float(proven) * unit * (1 - _SOLVER_TOLERANCE)
