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
    with pytest.raises(ConfigError, match=rf"world_size={world_size} .*with {next(iter(options))}="):
        Site(**options).layout(world_size)


@pytest.mark.parametrize(
    "options",
    [{"time_min": "1:00"}, {"mem_gb": -1}, {"partitions": "main"}, {"retries": -1}, {"scheduler": "pbs"}],
)
def test_impossible_options_are_told(options):
    with pytest.raises(ConfigError, match=f"site.{next(iter(options))}"):
        Site.from_dict(options)


@pytest.mark.parametrize(
    ("overrides", "world_size", "layout"),
    [
        (("site=slurm", "nodes=16", "gpus_per_node=4"), 64, (16, 4)),
        (("site=slurm", "nodes=16", "gpus_per_node=4", "world_size=32"), 32, (16, 2)),
        (("site=slurm", "nodes=3"), 3, (3, 1)),
        (("site=slurm", "gpus_per_node=4"), 1, (1, 1)),
        (("site=slurm", "gpus_per_node=4", "world_size=8"), 8, (2, 4)),
        (("site=a100_slingshot", "nodes=2"), 8, (2, 4)),  # the site says what fits on one
        (("site=a100_slingshot", "nodes=2", "gpus_per_node=2"), 4, (2, 2)),  # asked for is more than the site's
        (("site=slurm", "nodes=2", "site.nodes=4"), 2, (2, 1)),
        (("site=slurm", "site.nodes=4", "tasks_per_node=2"), 8, (4, 2)),
        (("site=local", "nodes=2", "gpus_per_node=2"), 4, (2, 2)),  # the same command without SLURM
        (("nodes=2", "tasks_per_node=2"), 4, (1, 4)),
        ((), 1, (1, 1)),
    ],
)
def test_nodes_are_asked_for_by_bare_keys(tmp_path, overrides, world_size, layout):
    request = compose(tmp_path, "cluster=default", "batch_size=8", *overrides)
    assert request.config.world_size == world_size
    assert request.site.layout(world_size) == layout
    assert "nodes" not in request.config.to_dict()


def test_impossible_nodes_are_told(tmp_path):
    for text in ("nodes=0", "gpus_per_node=many", "nodes=1.5"):
        with pytest.raises(ConfigError, match=f"^{text.partition('=')[0]}="):
            compose(tmp_path, "cluster=default", "site=slurm", text)
    with pytest.raises(ConfigError, match=r"^nodes=0"):
        Site.from_dict({"nodes": 0})


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


def test_no_script_holds_a_secret():
    for options in ({"setup": ("export HF_TOKEN=abcdefgh12",)}, {"extra": {"export": "WANDB_API_KEY=abcdefgh12"}}):
        with pytest.raises(ConfigError, match="no secrets in scripts") as told:
            Site(**options)
        assert "abcdefgh12" not in str(told.value)
    assert Site(setup=("export HF_TOKEN=$(cat ~/token)", "module load cuda", "export KEY_FILE=/home/me/key")).setup
