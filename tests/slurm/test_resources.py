"""Ranks on nodes, and what sbatch is asked for."""

import pytest

from experiments.settings import ConfigError
from slurm.resources import Resources


@pytest.mark.parametrize(
    ("options", "world_size", "layout"),
    [
        ({}, 4, (1, 4)),
        ({"nodes": 2}, 4, (2, 2)),
        ({"tasks_per_node": 4}, 16, (4, 4)),
        ({"tasks_per_node": 4}, 2, (1, 2)),
        ({"gpus_per_node": 4}, 8, (2, 4)),
        ({"gpus_per_node": 4, "nodes": 4}, 8, (4, 2)),
        ({"gpus_per_node": 8, "tasks_per_node": 2}, 8, (4, 2)),
    ],
)
def test_layout(options, world_size, layout):
    assert Resources(**options).layout(world_size) == layout


@pytest.mark.parametrize(
    ("options", "world_size"),
    [({"nodes": 2}, 3), ({"tasks_per_node": 4}, 7), ({"nodes": 4}, 2), ({"nodes": 2, "tasks_per_node": 2}, 8)],
)
def test_ranks_that_do_not_fit_are_told(options, world_size):
    with pytest.raises(ConfigError, match=rf"world_size={world_size} .*hydra.launcher.{next(iter(options))}="):
        Resources(**options).layout(world_size)


@pytest.mark.parametrize("options", [{"nodes": 0}, {"time_min": "1:00"}, {"mem_gb": -1}, {"partitions": "main"}])
def test_impossible_options_are_told(options):
    with pytest.raises(ConfigError, match=f"hydra.launcher.{next(iter(options))}"):
        Resources.from_dict(options)


def test_a_job_asks_for_no_more_gpus_than_it_has_ranks():
    resources = Resources(gpus_per_node=4, mem_gb=1.5, setup=("module load cuda",), extra={"hold": True})
    small, large = resources.submitit_parameters(2), resources.submitit_parameters(8)
    assert (small["gpus_per_node"], small["nodes"], small["ntasks_per_node"]) == (2, 1, 2)
    assert (large["gpus_per_node"], large["nodes"], large["ntasks_per_node"]) == (4, 2, 4)
    assert small["mem"] == "1536M"
    assert small["setup"][-1] == "module load cuda"
    assert small["additional_parameters"] == {"hold": True}
    assert "partition" not in small  # left to the cluster's default
