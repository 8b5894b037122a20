"""Random models, clusters and plans of whole seconds, for all that is tested of simulations."""

import random

from kfac.planning import ClusterProfile, LayerProfile, LinearCost, ModelProfile, ScheduleConfig
from kfac.planning.schedule_config import CHOICES
from kfac.schedules import make_plan

FREE = LinearCost(0, 0)


def random_model(dice, layers=5):
    return ModelProfile(
        name="random",
        layers=tuple(
            LayerProfile(
                name=f"l{k}",
                a_dim=0 if (plain := dice.random() < 0.2) else dice.randint(1, 6),
                g_dim=0 if plain else dice.randint(1, 6),
                gradient_elements=dice.randint(0, 9),
                forward_s=dice.randint(0, 5),
                backward_s=dice.randint(0, 9),
                a_statistics_s=dice.randint(0, 6),
                g_statistics_s=dice.randint(0, 6),
                precondition_s=dice.randint(0, 3),
            )
            for k in range(layers)
        ),
        loss_s=dice.randint(0, 3),
        update_s=dice.randint(0, 3),
    )


def random_cluster(dice, world_size):
    return ClusterProfile(
        world_size=world_size,
        all_reduce=LinearCost(dice.randint(0, 4), dice.randint(0, 2)),
        reduce=LinearCost(dice.randint(0, 4), dice.randint(0, 2)),
        broadcast=LinearCost(dice.randint(0, 4), dice.randint(0, 1)),
        inverse=dice.choice((lambda d: d, lambda d: d * d, lambda d: 3)),
    )


def random_schedule(dice):
    switches = {key: dice.choice(values) for key, values in CHOICES.items()}
    switches["gradient_worker_fraction"] = dice.choice((0.0, 0.5, 1.0))
    if switches["factor_collective"] == "none":
        switches |= {"gradient_worker_fraction": 0.0, "message_dtype": "full"}
    if switches["factor_collective"] != "all_reduce" or switches["message_dtype"] != "full":
        switches["inverse_start"] = "after_all"
    if switches["placement"] == "non_dist" and switches["gradient_worker_fraction"] < 1:
        switches["placement"] = "seq_dist"
    on_or_off = {key: dice.random() < 0.8 for key in ("curvature", "gradient_pipelining")}
    return ScheduleConfig(
        **switches, **on_or_off, threshold_bytes=dice.randint(4, 200), lbp_rule=dice.choice(("cost", 3))
    )


def cases(seed, count):
    dice = random.Random(seed)
    for _ in range(count):
        model, cluster = random_model(dice), random_cluster(dice, dice.randint(1, 5))
        plan = make_plan(random_schedule(dice), model, cluster)
        yield plan, model, cluster.at(plan.world_size)
