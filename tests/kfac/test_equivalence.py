"""Every schedule, on any number of ranks, is the sequential algorithm on the concatenated batch."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from kfac import KFAC, KFACConfig, ScheduleConfig
from kfac.communication import LocalCommunicator, get_communicator
from tests.kfac.models import make_data, make_model, shards
from tests.kfac.ranks import run_ranks
from tests.kfac.reference import ReferenceKFAC

STEPS, SAMPLES, LR = 10, 16, 0.05

VARIANTS: dict[str, dict] = {
    "pi": {"damping_method": "pi"},
    "plain": {"damping_method": "plain"},
    "intervals": {"factor_interval": 2, "inverse_interval": 4, "kl_clip": None},
}

SCHEDULES: dict[str, str | ScheduleConfig] = {
    "dkfac": "dkfac",
    "mpdkfac": "mpdkfac",
    "spdkfac": "spdkfac",
    "auto": "auto",
    **{
        f"{pipelining}-{fusion}-{placement}": ScheduleConfig(
            pipelining=pipelining, fusion=fusion, placement=placement, lbp_rule=15, threshold_bytes=2000
        )
        for pipelining, fusion, placement in itertools.product(
            ("none", "layerwise"), ("none", "threshold", "greedy", "optimal"), ("seq_dist", "lbp", "optimized")
        )
        if (fusion, placement) in {("none", "lbp"), ("threshold", "optimized"), ("optimal", "seq_dist")}
    },
}


def options(variant: str) -> dict:
    return {"damping": 0.01, "factor_decay": 0.9, "kl_clip": 1e-3, "lr": LR, **VARIANTS[variant]}


def reference_parameters(variant: str) -> torch.Tensor:
    model = make_model()
    o = options(variant)
    reference = ReferenceKFAC(
        model,
        damping=o["damping"],
        method=o.get("damping_method", "pi"),
        decay=o["factor_decay"],
        kl_clip=o["kl_clip"],
        lr=LR,
        factor_interval=o.get("factor_interval", 1),
        inverse_interval=o.get("inverse_interval", 1),
    )
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    for step in range(STEPS):
        x, y = make_data(SAMPLES, step)
        reference.step(x, y, F.cross_entropy)
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


class WithoutFactorTraffic:
    """A communicator that loses the factors' all-reduce: what a broken schedule would do."""

    def __init__(self, inner) -> None:
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def all_reduce(self, tensor, name):
        if "Factor" in name:
            return LocalCommunicator().all_reduce(tensor, name)
        return self._inner.all_reduce(tensor, name)


def train(rank, world_size, schedule, variant, *, broken=False, accumulation=1) -> torch.Tensor:
    model = make_model()
    communicator = WithoutFactorTraffic(get_communicator()) if broken else None
    config = KFACConfig(**options(variant), accumulation_steps=accumulation)
    kfac = KFAC(model, config, schedule, average_gradients=True, communicator=communicator)
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    for step in range(STEPS):
        x, y = make_data(SAMPLES, step)
        mine = shards(SAMPLES, world_size)[rank]
        x, y = x[mine], y[mine]
        optimizer.zero_grad()
        for micro_x, micro_y in zip(x.tensor_split(accumulation), y.tensor_split(accumulation), strict=True):
            # the shards are unequal: the user weights the loss so that the average over ranks is the batch's mean
            weight = len(micro_y) * world_size / SAMPLES
            (F.cross_entropy(model(micro_x), micro_y) * weight).backward()
        kfac.step()
        optimizer.step()
    kfac.close()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def all_cells(rank, world_size) -> dict:
    results = {(s, v): train(rank, world_size, SCHEDULES[s], v) for s in SCHEDULES for v in ("pi",)}
    for variant in ("plain", "intervals"):
        for schedule in ("dkfac", "mpdkfac", "spdkfac"):
            results[schedule, variant] = train(rank, world_size, schedule, variant)
    results["spdkfac, 2 micro-batches", "pi"] = train(rank, world_size, "spdkfac", "pi", accumulation=2)
    if world_size > 1:
        results["broken", "pi"] = train(rank, world_size, "spdkfac", "pi", broken=True)
    return results


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_schedules_equal_the_sequential_reference(world_size):
    ranks = run_ranks(all_cells, world_size)
    references = {variant: reference_parameters(variant) for variant in VARIANTS}
    for (schedule, variant), parameters in ranks[0].items():
        error = (parameters - references[variant]).abs().max().item()
        if schedule == "broken":
            assert error > 1e-5, "the test must fail when the factors' all-reduce is removed"
        else:
            assert error < 1e-10, f"{schedule}, {variant}: {error:.1e} from the reference"
            for rank, other in enumerate(ranks):
                assert torch.equal(other[schedule, variant], parameters), f"{schedule}: rank {rank} differs from rank 0"


def test_the_reference_moves():
    """The parameters compared above are far from where they started, and the variants differ from each other."""
    start = torch.nn.utils.parameters_to_vector(make_model().parameters()).detach()
    ends = [reference_parameters(variant) for variant in VARIANTS]
    for end in ends:
        assert (end - start).abs().max() > 1e-2
    for a, b in itertools.combinations(ends, 2):
        assert (a - b).abs().max() > 1e-4
