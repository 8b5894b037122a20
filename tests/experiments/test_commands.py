"""profile and simulate end to end, and all of it from an installed wheel."""

import subprocess
import sys
import zipfile

import pytest

from experiments.config import TrainConfig
from experiments.records import find_records
from kfac.planning import ClusterProfile, ModelProfile
from kfac.planning.profiles import DisturbedCluster, Interference
from kfac.planning.scaling import scaled_cluster
from kfac.planning.shipped_profiles import load_shipped_cluster, load_shipped_model
from kfac.schedules import make_plan
from kfac.simulation import simulate
from kfac.timeline import Timeline
from tests.experiments.conftest import ROOT
from tests.experiments.test_config import compose


def test_simulate_is_the_simulator(command, tmp_path):
    done = command("simulate", "model=resnet50", "schedule=spdkfac", "world_size=16")
    model, cluster = load_shipped_model("resnet50"), load_shipped_cluster("paper64").at(16)
    expected = simulate(make_plan("spdkfac", model, cluster), model, cluster)
    written = Timeline.from_chrome_trace(tmp_path / "simulated" / "resnet50-spdkfac-w16.trace.json")
    assert written.iteration_s == pytest.approx(expected.iteration_s)
    assert written.breakdown_s() == pytest.approx(expected.breakdown_s())
    assert f"{1e3 * expected.iteration_s:.2f}" in done.stdout
    assert f"{1e3 * expected.breakdown_s()['InverseComm']:.2f}" in done.stdout
    assert (tmp_path / "simulated" / "resnet50-spdkfac-w16.html").exists()
    assert "Collectives cost what they do on the profile's 64 ranks" in done.stdout
    ring = command("simulate", "model=resnet50", "schedule=spdkfac", "world_size=16", "scaling=ring")
    cluster = scaled_cluster(load_shipped_cluster("paper64"), 16, "ring")
    scaled = simulate(make_plan("spdkfac", model, cluster), model, cluster)
    assert scaled.iteration_s < 0.99 * expected.iteration_s
    assert f"{1e3 * scaled.iteration_s:.2f}" in ring.stdout
    assert "Collectives cost" not in ring.stdout
    names = {path.name for path in (tmp_path / "simulated").glob("*.html")}
    assert names == {"resnet50-spdkfac-w16.html", "resnet50-spdkfac-w16-ring.html"}, "neither overwrites the other"


def test_profiles_are_written_and_planned_from(command, tmp_path):
    small = ("model=mlp", "model.hidden=[16]", "data.image_size=8", "world_size=2")
    done = command("profile", *small, "output=p", "profiling.iterations=2", "profiling.repeats=2")
    assert "all_reduce on 2 ranks" in done.stdout
    model = ModelProfile.load(tmp_path / "p" / "model_profile.json")
    cluster = ClusterProfile.load(tmp_path / "p" / "cluster_profile.json")
    assert [(layer.a_dim, layer.g_dim) for layer in model.layers] == [(193, 16), (17, 10)]
    assert cluster.world_size == 2
    files = [f"cluster={tmp_path}/p/cluster_profile.json", f"model_profile={tmp_path}/p/model_profile.json"]
    planned = TrainConfig.from_dict(compose(*small, *files))
    assert [profile.to_dict() for profile in planned.profiles()] == [model.to_dict(), cluster.to_dict()]
    assert not planned.measures
    done = command("simulate", *files, "schedule=dkfac")
    assert "slow computing down" not in done.stdout
    disturbed = DisturbedCluster.disturbed(cluster, Interference(element_s=1e-9))
    disturbed.save(tmp_path / "disturbed.json")
    again = command("simulate", files[1], f"cluster={tmp_path}/disturbed.json", "schedule=dkfac")
    assert "This cluster's messages slow computing down" in again.stdout
    assert "mlp-dkfac-w2-cluster_profile" in done.stdout
    expected = simulate(make_plan("dkfac", model, cluster), model, cluster)
    assert f"{1e3 * expected.iteration_s:.2f}" in done.stdout


PARTS = ("pyproject.toml", "LICENSE", "kfac", "experiments", "slurm", "analysis", "paper_figures", "hydra_plugins")
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel's files, without a checkout around them."""
    pytest.importorskip("setuptools")
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    subprocess.run(["cp", "-r", *(str(ROOT / name) for name in PARTS), str(source)], check=True)
    (source / "README.md").write_text("a stand-in: the text is no part of what is tested")
    subprocess.run([sys.executable, "-c", BUILD, str(source)], cwd=source, check=True, capture_output=True)
    (wheel,) = source.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    return site


def test_an_installed_wheel_trains_and_simulates(command, installed, tmp_path):
    overrides = ("model=mlp", "data.image_size=8", "iterations=2", "tracking=none", "timeline.start=1")
    done = command("train", *overrides, PYTHONPATH=str(installed))
    assert "iteration 2/2" in done.stdout
    (record,) = find_records(tmp_path)
    assert set(record.head["code"]) == {"version"}  # no checkout, so no commit
    assert (record.path / "timeline.html").exists()
    assert "written" in command("simulate", PYTHONPATH=str(installed)).stdout
