"""What travels in which order: messages of the measured and of the planned schedules."""

from __future__ import annotations

from collections import Counter

import torch.nn.functional as F

from kfac import KFAC, KFACConfig, ScheduleConfig
from kfac.recording import Recorder
from tests.kfac.communicators import Recording, Sent, TwoRanks
from tests.kfac.models import make_data, make_model, recorded_step
from tests.kfac.ranks import run_ranks


def traffic(schedule) -> tuple[list[Sent], list[Sent], list[Sent]]:
    """What left in one rank's second iteration: in the forward pass, in the backward pass, and after that."""
    model, log = make_model(), Recording(TwoRanks())
    kfac = KFAC(model, KFACConfig(), schedule, average_gradients=True, communicator=log)
    for step in range(2):
        log.sent.clear()
        x, y = make_data(4, step)
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        forward = len(log.sent)
        loss.backward()
        backward = len(log.sent)
        kfac.step()
    return log.sent[:forward], log.sent[forward:backward], log.sent[backward:]


def kinds(sent) -> Counter[str]:
    return Counter(one.kind for one in sent)


def test_layerwise_pipelining_sends_a_in_the_forward_pass_and_g_in_the_backward_pass():
    forward, backward, after = traffic(
        ScheduleConfig(pipelining="layerwise", fusion="none", placement="lbp", lbp_rule=0)
    )
    assert kinds(forward) == {"FactorComm": 7}
    assert kinds(backward) == {"FactorComm": 7, "GradComm": 7}
    assert kinds(after) == {"InverseComm": 13}  # a norm's A is 1: nobody needs it sent


def test_without_pipelining_factors_leave_after_the_backward_pass():
    forward, backward, after = traffic("dkfac")
    assert not forward
    assert "FactorComm" not in kinds(backward)
    assert "FactorComm" in kinds(after)
    assert "InverseComm" not in kinds(after)


def test_triangles_travel_and_fusion_keeps_the_elements():
    dims_a, dims_g = [18, 37, 4, 37, 21, 8], [4, 6, 6, 5, 7, 3]
    norm = 1 + 4 * 3  # A is 1; G has a 2 x 2 block for each of 4 channels
    triangles = sum(d * (d + 1) // 2 for d in dims_a + dims_g) + norm
    for fusion in ("none", "threshold", "greedy", "optimal"):
        schedule = ScheduleConfig(pipelining="layerwise", fusion=fusion, placement="non_dist")
        sent = [one.elements for part in traffic(schedule) for one in part if one.kind == "FactorComm"]
        assert sum(sent) == triangles + 14, "packed triangles and one sample count per factor"
        assert (len(sent) == 14) == (fusion == "none")


def test_sgd_sends_gradients_only_and_steps_like_plain_sgd():
    assert set(kinds(one for part in traffic("sgd") for one in part)) == {"GradComm"}


# ---------------------------------------------------------------------- on two ranks, as measured


def _two_rank_timeline(rank, world_size, schedule):
    model = make_model()
    recorder = Recorder(rank=rank)
    kfac = KFAC(model, KFACConfig(), schedule, average_gradients=True, recorder=recorder)
    timeline = recorded_step(kfac, model, recorder)
    return [(s.lane, s.kind, s.name, s.start_s, s.end_s) for s in timeline.spans]


def test_messages_are_in_flight_while_the_measured_ranks_compute():
    schedule = ScheduleConfig(pipelining="layerwise", fusion="none", placement="seq_dist")
    for spans in run_ranks(_two_rank_timeline, 2, schedule):
        first_backward_s = min(start for _, kind, _, start, _ in spans if kind == "BP")
        sent = [start for lane, kind, name, start, _ in spans if kind == "FactorComm" and name.startswith("A message")]
        assert len(sent) == 7
        assert min(sent) < first_backward_s, "A leaves before the backward pass starts"
        assert {kind for lane, kind, *_ in spans if lane == "communication"} == {
            "FactorComm",
            "GradComm",
            "InverseComm",
        }
