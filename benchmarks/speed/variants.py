"""What is measured side by side: every variant is a schedule, by its switches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SGD, BASELINE, PAPER, AUTO, KAISA = "sgd", "dkfac", "spdkfac", "auto", "kaisa"
"""The variants that figures and goals name; the baseline is what all others are compared with."""

_BLOCKING: Mapping[str, Any] = {"gradient_pipelining": False}
"""Gradients leave after the backward pass, as in the paper's D-KFAC and MPD-KFAC."""

_OURS: Mapping[str, Any] = {"name": "spdkfac", "fusion": "optimal", "placement": "optimized"}

VARIANTS: dict[str, Mapping[str, Any]] = {
    SGD: {"name": "sgd"},
    BASELINE: {"name": "dkfac", **_BLOCKING},
    # The four cells of the ablation: pipelining off and on, round robin and LBP.
    "mpdkfac": {"name": "mpdkfac", **_BLOCKING},
    "pipelined_round_robin": {"name": "spdkfac", "placement": "seq_dist"},
    "lbp_after_backward": {"name": "spdkfac", "pipelining": "none", "fusion": "threshold", **_BLOCKING},
    PAPER: {"name": "spdkfac"},
    # Pipelining, with the paper's placement.
    "layerwise": {"name": "spdkfac", "fusion": "none"},
    "threshold_fusion": {"name": "spdkfac", "fusion": "threshold"},
    "optimal_fusion": {"name": "spdkfac", "fusion": "optimal"},
    # Placement, with the paper's pipelining.
    "non_dist": {"name": "spdkfac", "placement": "non_dist"},
    "lbp_1400": {"name": "spdkfac", "lbp_rule": 1400},
    "optimized": {"name": "spdkfac", "placement": "optimized"},
    # Beyond the paper: fewer bytes, inversions that do not wait, and what the planner chooses.
    "reduce_to_owner": {**_OURS, "factor_collective": "reduce_to_owner", "inverse_fusion": "owner"},
    "gradient_workers": {**_OURS, "gradient_worker_fraction": 0.0},
    "bfloat16": {**_OURS, "message_dtype": "bfloat16"},
    "early_inversion": {**_OURS, "inverse_start": "as_ready"},
    "dp_kfac": {"name": "dp_kfac"},
    AUTO: {"name": "auto"},
}
"""By name what :func:`kfac.schedules.make_plan` takes."""

TITLES: dict[str, str] = {
    SGD: "S-SGD",
    BASELINE: "D-KFAC",
    "mpdkfac": "MPD-KFAC: round robin, no pipelining",
    "pipelined_round_robin": "pipelining, round robin",
    "lbp_after_backward": "LBP, no pipelining",
    PAPER: "SPD-KFAC: pipelining, LBP",
    "layerwise": "SPD-KFAC without fusion",
    "threshold_fusion": "SPD-KFAC, threshold fusion",
    "optimal_fusion": "SPD-KFAC, optimal fusion",
    "non_dist": "SPD-KFAC, every rank inverts all",
    "lbp_1400": "SPD-KFAC, LBP below 1400 on all",
    "optimized": "SPD-KFAC, optimized placement",
    "reduce_to_owner": "optimal, optimized, sums to their owners, inverses fused",
    "gradient_workers": "optimal, optimized, a layer's owner preconditions it",
    "bfloat16": "optimal, optimized, factors as bfloat16",
    "early_inversion": "optimal, optimized, inversions as soon as sums arrive",
    "dp_kfac": "DP-KFAC (other mathematics)",
    AUTO: "auto",
    KAISA: "KAISA",
}
"""As reports name them."""

NAMED = (BASELINE, "mpdkfac", PAPER)
"""The paper's K-FAC schedules, none of which ``auto`` should be slower than."""

FEW = (SGD, BASELINE, "mpdkfac", PAPER, AUTO)
"""Those of a model whose iterations take seconds."""

PREDICTED = tuple(name for name in VARIANTS if name not in (AUTO, "dp_kfac", "non_dist", "lbp_1400"))
"""Those of links and models that only predictions are tested on."""

HALF = (SGD, BASELINE, "mpdkfac", PAPER, "layerwise", "threshold_fusion", "optimal_fusion", "gradient_workers")
"""Those of a second batch size."""
