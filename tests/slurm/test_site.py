"""Ranks on nodes, and what sbatch is asked for."""

from pathlib import Path

import pytest
import yaml

import experiments.conf
from experiments.settings import ConfigError
from slurm.site import Site
from tests.slurm.conftest import compose


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
    assert Site(**options).layout(world_size) == layout


@pytest.mark.parametrize(
    ("options", "world_size"),
    [({"nodes": 2}, 3), ({"tasks_per_node": 4}, 7), ({"nodes": 4}, 2), ({"nodes": 2, "tasks_per_node": 2}, 8)],
)
def test_ranks_that_do_not_fit_are_told(options, world_size):
    with pytest.raises(ConfigError, match=rf"world_size={world_size} .*site.{next(iter(options))}="):
        Site(**options).layout(world_size)


@pytest.mark.parametrize(
    "options",
    [{"nodes": 0}, {"time_min": "1:00"}, {"mem_gb": -1}, {"partitions": "main"}, {"retries": -1}, {"scheduler": "pbs"}],
)
def test_impossible_options_are_told(options):
    with pytest.raises(ConfigError, match=f"site.{next(iter(options))}"):
        Site.from_dict(options)


def parameters(site, world_size, dependency=None):
    return site.submitit_parameters(world_size, sweep="/runs/a b", code="/runs/code", dependency=dependency)


def test_a_job_asks_for_no_more_gpus_than_it_has_ranks():
    site = Site(gpus_per_node=4, mem_gb=1.5, setup=("module load cuda",), extra={"hold": True}, signal_s=300)
    small, large = parameters(site, 2), parameters(site, 8, "afterok:7")
    assert (small["gpus_per_node"], small["nodes"], small["ntasks_per_node"]) == (2, 1, 2)
    assert (large["gpus_per_node"], large["nodes"], large["ntasks_per_node"]) == (4, 2, 4)
    assert small["mem"] == "1536M"
    assert small["setup"][0] == "module load cuda"
    assert small["signal_delay_s"] == 300
    assert small["additional_parameters"] == {"hold": True, "requeue": True}
    assert large["additional_parameters"]["kill-on-invalid-dep"] == "yes"
    assert large["dependency"] == "afterok:7"
    assert "'/runs/a b'" in small["teardown"][0]
    assert "partition" not in small  # left to the cluster's default
    assert [site.gpus(size) for size in (2, 8)] == [2, 8]
    assert Site(gpus_per_node=4, exclusive=True).gpus(2) == 4


SITES = sorted(path.stem for path in (Path(experiments.conf.__file__).parent / "site").glob("*.yaml"))


@pytest.mark.parametrize("name", SITES)
def test_the_shipped_sites(tmp_path, name):
    site = compose(tmp_path, f"site={name}").site
    text = yaml.safe_load((Path(experiments.conf.__file__).parent / "site" / f"{name}.yaml").read_text())
    asked = {key: value for key, value in text.items() if key != "defaults"}
    assert {key: getattr(site, key) for key in asked if not isinstance(asked[key], (list, dict))} == {
        key: value for key, value in asked.items() if not isinstance(value, (list, dict))
    }
    assert Site.from_dict(site.to_dict()) == site


def test_the_container_comes_before_python():
    command = Site(container="apptainer exec --nv image.sif", python="python3").command
    assert command == "apptainer exec --nv image.sif python3"
