"""Tensor fusion: what every rule leaves of the messages after the backward pass, and how rules bear noise."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import mean
from typing import Any

from kfac.planning import (
    ClusterProfile,
    LinearCost,
    ModelProfile,
    Plan,
    PolynomialCost,
    ScheduleConfig,
    fusion_finish_s,
    plan_fusion,
)
from kfac.planning.iteration_bound import merged_family, message_families
from kfac.planning.joint_fusion import Family, Sent, joint_finish_s, plan_joint_fusion
from kfac.planning.ready_times import ready_times
from kfac.planning.schedule_config import CHOICES
from kfac.planning.shipped_profiles import load_shipped_cluster, load_shipped_model
from kfac.schedules import make_plan
from kfac.simulation import simulated_iteration_s
from paper_figures import published

CLUSTERS = {"paper64": "the paper's 64 GPUs", "default": "10 Gbit/s"}
NOISE, DRAWS = 0.2, 40
RANDOM_INSTANCES = 5000


def random_instances(count: int, seed: int = 0) -> Iterator[tuple[list[float], list[float], LinearCost]]:
    """Ready times, sizes and costs of 2 to 12 tensors, of which no term dominates."""
    dice = random.Random(seed)
    for _ in range(count):
        m = dice.randint(2, 12)
        ready = sorted(dice.uniform(0, 20) for _ in range(m))
        yield ready, [dice.uniform(0, 4) for _ in range(m)], LinearCost(dice.uniform(0, 4), dice.uniform(0, 1))


def greedy_on_random_instances(count: int = RANDOM_INSTANCES) -> dict[str, float]:
    """How often and how far the greedy rule is from the optimum."""
    excess = []
    for ready, elements, cost in random_instances(count):
        greedy, best = (
            fusion_finish_s(plan_fusion(ready, elements, cost, rule), ready, elements, cost)
            for rule in ("greedy", "optimal")
        )
        excess.append(greedy / best - 1)
    return {"instances": count, "worse": sum(e > 1e-9 for e in excess), "worst": max(excess)}


def message_plan(rule: str, model: ModelProfile, cluster: ClusterProfile) -> Plan:
    """The plan under a fusion rule; its inversions take no time."""
    return make_plan(ScheduleConfig(fusion=rule, placement="non_dist"), model, cluster)


def last_arrival_s(plan: Plan, model: ModelProfile, cluster: ClusterProfile) -> float:
    """When passes and messages have ended, with messages that may have been planned for other seconds."""
    return simulated_iteration_s(plan, model, replace(cluster, inverse=PolynomialCost((0.0,))))


def apart_s(of: Mapping[str, Family], cluster: ClusterProfile) -> float:
    """The last arrival where G and gradients are each grouped optimally as if they had the channel to themselves."""
    a, g, gradient = of["A"], of["G"], of["gradient"]
    sent_a = plan_joint_fusion([a], cluster.all_reduce)
    busy = joint_finish_s(sent_a, [a], cluster.all_reduce)
    sent = [
        Sent(k, message.group)
        for k, family in enumerate((g, gradient))
        for message in plan_joint_fusion([family], cluster.all_reduce, start_s=busy)
    ]
    sent.sort(key=lambda message: (g, gradient)[message.family].ready_s[message.group[-1]])
    return joint_finish_s(sent, [g, gradient], cluster.all_reduce, start_s=busy)


def row(key: str, cluster_name: str, draws: int = DRAWS) -> dict[str, Any]:
    """One model on one cluster: seconds of messages after the backward pass (the tail) under every rule."""
    model, cluster = load_shipped_model(key), load_shipped_cluster(cluster_name)
    end_s = ready_times(model).backward_end_s
    plans = {rule: message_plan(rule, model, cluster) for rule in CHOICES["fusion"]}
    tail_s = {rule: last_arrival_s(plan, model, cluster) - end_s for rule, plan in plans.items()}
    of = message_families(model)

    def best_s(*parts: Family) -> float:
        return joint_finish_s(plan_joint_fusion(parts, cluster.all_reduce), parts, cluster.all_reduce) - end_s

    dice = random.Random(0)
    regrets: dict[str, list[float]] = {"greedy": [], "optimal": []}
    for _ in range(draws):
        disturbed = _disturbed(model, dice)
        best = last_arrival_s(message_plan("optimal", disturbed, cluster), disturbed, cluster)
        for rule, found in regrets.items():
            found.append(last_arrival_s(plans[rule], disturbed, cluster) / best - 1)
    return {
        "model": published.model(key).name,
        "cluster": cluster_name,
        "backward_end_s": end_s,
        "tail_s": {
            **tail_s,
            "kinds apart": apart_s(of, cluster) - end_s,
            "A with G": best_s(merged_family([of["A"], of["G"]]), of["gradient"]),
            "G with gradients": best_s(of["A"], merged_family([of["G"], of["gradient"]])),
            "all in one": best_s(merged_family(list(of.values()))),
        },
        "mean_regret": {rule: mean(found) if found else None for rule, found in regrets.items()},
    }


def _disturbed(model: ModelProfile, dice: random.Random) -> ModelProfile:
    """The model with each of its seconds off by up to :data:`NOISE`."""
    names = ("forward_s", "backward_s", "a_statistics_s", "g_statistics_s")
    layers = tuple(
        replace(layer, **{name: getattr(layer, name) * dice.uniform(1 - NOISE, 1 + NOISE) for name in names})
        for layer in model.layers
    )
    return replace(model, layers=layers)


def rows() -> Iterator[dict[str, Any]]:
    """The paper's models on both clusters."""
    for cluster_name in CLUSTERS:
        for key in published.model_keys():
            yield row(key, cluster_name)
