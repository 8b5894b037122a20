"""What a step that could not invert a factor leaves behind, and how a training loop goes on as docs/kfac.md says."""

import copy

import torch
import torch.nn.functional as F

from kfac import KFAC, FactorInversionError, KFACConfig
from tests.kfac.models import make_data, make_model
from tests.kfac.ranks import run_ranks

BAD = 3


def trained(rank, world_size, bad, restores):
    """Six steps, the one of the bad batch without an update; what its end left, the final parameters and errors."""
    model = make_model()
    kfac = KFAC(model, KFACConfig(kl_clip=1e-2), "spdkfac", average_gradients=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    left, errors = None, []
    for number in range(6):
        if number == BAD and not bad:
            continue
        x, y = (t[rank::world_size] for t in make_data(4 * world_size, number))
        saved = copy.deepcopy(kfac.state_dict())
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if number == BAD:
            kfac._factors["0", "G"].average.mul_(-1e6)  # a damaged average: no statistics give a negative factor
        try:
            kfac.step()
        except FactorInversionError as error:
            errors.append((number, str(error)))
            now = kfac.state_dict()
            left = left or {
                part: [
                    torch.equal(factor[part], now["factors"][name][part])
                    for name, factor in saved["factors"].items()
                    if factor[part] is not None
                ]
                for part in ("average", "inverse")
            } | {"steps": now["steps"] - saved["steps"]}
            if restores:
                kfac.load_state_dict(saved)
        else:
            optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach(), left, errors


def test_going_on_from_the_state_before_is_as_if_the_batch_had_not_been_there():
    ((restored, left, errors), other), (without, *_), (poisoned, _, again) = (
        run_ranks(trained, 2, True, True),
        run_ranks(trained, 2, False, True)[0],
        run_ranks(trained, 2, True, False)[0],
    )
    assert [number for number, _ in errors] == [BAD]
    assert "Raise KFACConfig.damping" in errors[0][1]
    assert torch.equal(restored, without)
    assert torch.equal(restored, other[0])
    assert errors == other[2]
    assert left["steps"] == 0
    assert all(left["inverse"])
    assert not any(left["average"]), "what the page says stays"
    assert [number for number, _ in again] == [BAD, BAD + 1, BAD + 2], "the control: the average fails again"
    assert not torch.equal(poisoned, without)
