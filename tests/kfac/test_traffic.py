"""What travels in which order: messages of the measured and of the planned schedules."""

from __future__ import annotations

import torch.nn.functional as F

from kfac import KFAC, KFACConfig, ScheduleConfig
from kfac.communication import LocalCommunicator
from kfac.recording import Recorder
from tests.kfac.models import make_data, make_model
from tests.kfac.ranks import run_ranks


class Log(LocalCommunicator):
    """Two ranks as far as the plan goes; writes down what leaves when."""

    world_size = 2

    def __init__(self) -> None:
        self.events: list[str] = []

    def all_reduce(self, tensor, name):
        self.events.append(f"{name} {tensor.numel()}")
        return super().all_reduce(tensor, name)

    def broadcast(self, tensor, src, name):
        self.events.append(f"{name} from {src} {tensor.numel()}")
        if src != self.rank:
            tensor.zero_()  # nobody sends: what the memory held before must not pass for an inverse
        return super().broadcast(tensor, src, name)

    def all_gather_object(self, obj):
        return [obj, obj]


def traffic(schedule) -> list[str]:
    """What left in the second iteration of one rank, with marks at the ends of the forward and backward pass."""
    model, log = make_model(), Log()
    kfac = KFAC(model, KFACConfig(), schedule, average_gradients=True, communicator=log)
    for step in range(2):
        log.events.clear()
        x, y = make_data(4, step)
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        log.events.append("forward ends")
        loss.backward()
        log.events.append("backward ends")
        kfac.step()
    return log.events


def test_layerwise_pipelining_sends_a_in_the_forward_pass_and_g_in_the_backward_pass():
    events = traffic(ScheduleConfig(pipelining="layerwise", fusion="none", placement="lbp", lbp_rule=0))
    forward, backward = events.index("forward ends"), events.index("backward ends")
    assert sum("FactorComm" in e for e in events[:forward]) == 7
    assert sum("FactorComm" in e for e in events[forward:backward]) == 7
    assert sum("GradComm" in e for e in events[forward:backward]) == 7
    assert all("InverseComm" in e for e in events[backward + 1 :])
    assert sum("InverseComm" in e for e in events[backward + 1 :]) == 13  # a norm's A is 1: nobody needs it sent


def test_without_pipelining_factors_leave_after_the_backward_pass():
    events = traffic("dkfac")
    backward = events.index("backward ends")
    assert not any("FactorComm" in e for e in events[:backward])
    assert any("FactorComm" in e for e in events[backward:])
    assert not any("InverseComm" in e for e in events)


def test_triangles_travel_and_fusion_keeps_the_elements():
    dims_a, dims_g = [18, 37, 4, 37, 21, 8], [4, 6, 6, 5, 7, 3]
    norm = 1 + 4 * 3  # A is 1; G has a 2 x 2 block for each of 4 channels
    triangles = sum(d * (d + 1) // 2 for d in dims_a + dims_g) + norm
    for fusion in ("none", "threshold", "greedy", "optimal"):
        events = traffic(ScheduleConfig(pipelining="layerwise", fusion=fusion, placement="non_dist"))
        sent = [int(e.split()[-1]) for e in events if "FactorComm" in e]
        assert sum(sent) == triangles + 14, "packed triangles and one sample count per factor"
        assert (len(sent) == 14) == (fusion == "none")


def test_sgd_sends_gradients_only_and_steps_like_plain_sgd():
    events = traffic("sgd")
    assert {e.split()[0] for e in events if "ends" not in e} == {"kfac_GradComm"}


# ---------------------------------------------------------------------- on two ranks, as measured


def _two_rank_timeline(rank, world_size, schedule):
    model = make_model()
    recorder = Recorder(rank=rank)
    kfac = KFAC(model, KFACConfig(), schedule, average_gradients=True, recorder=recorder)
    for step in range(3):
        x, y = make_data(8, step)
        recorder.start()
        model.zero_grad()
        with recorder.span("FF", "forward"):
            loss = F.cross_entropy(model(x), y)
        with recorder.span("BP", "backward"):
            loss.backward()
        kfac.step()
        timeline = recorder.stop()
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
