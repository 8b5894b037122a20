"""What is made of a few records and a profile, once for all tests, and its files."""

import csv

import pytest

from kfac.planning import ClusterProfile, LinearCost, PolynomialCost
from paper_figures.__main__ import main
from tests.analysis.records import write_record

FILES = {
    "models": (".md", ".tex", ".csv"),
    "iteration_time": (".md", ".tex", ".csv"),
    "measured_iteration_time": (".md", ".tex", ".csv"),
    "ablation": (".md", ".tex", ".csv"),
    "overlap": (".md", ".tex", ".csv"),
    **dict.fromkeys(
        (
            "factor_sizes",
            "motivation",
            "communication_costs",
            "inverse_costs",
            "breakdown",
            "pipelining",
            "inverse_placement",
            "convergence",
        ),
        (".pdf", ".png"),
    ),
    "measured_breakdown": (".pdf", ".png"),
    "placement_bounds": (".pdf", ".png"),
    "scaling": (".pdf", ".png"),
}


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_record(folder, "resnet20-dkfac-w2-s0-00000000", schedule="dkfac", times_s=(9.0, 0.4, 0.39, 0.41))
    write_record(folder, "resnet20-mpdkfac-w2-s0-00000000", schedule="mpdkfac", times_s=(9.0, 0.3, 0.29, 0.31))
    write_record(folder, "resnet20-spdkfac-w2-s0-00000000", schedule="spdkfac", times_s=(9.0, 0.2, 0.19, 0.21))
    write_record(folder, "resnet20-spdkfac-w2-s1-00000000", seed=1, times_s=(9.0, 0.22, 0.21, 0.23))
    write_record(folder, "resnet20-kfac-w1-s0-00000000", schedule="kfac", world_size=1)
    write_record(folder, "resnet20-sgd-w2-s0-00000000", schedule="sgd", status="failed")
    (write_record(folder, "damaged") / "run.json").write_text("{")
    (folder / "profiles").mkdir()
    line, points = LinearCost(1e-3, 1e-8), {"elements": [1000, 1000000], "seconds": [0.001, 0.011]}
    ClusterProfile(
        world_size=2,
        all_reduce=line,
        reduce=line,
        broadcast=line,
        inverse=PolynomialCost((1e-4, 1e-3)),
        provenance={
            "kind": "measured",
            "all_reduce": points,
            "broadcast": points,
            "inverse": {"dims": [64, 512], "seconds": [2e-4, 6e-4]},
        },
    ).save(folder / "profiles" / "cluster_profile.json")
    return folder


@pytest.fixture(scope="session")
def out(tmp_path_factory, runs):
    folder = tmp_path_factory.mktemp("out")
    assert main(["--out", str(folder), "--runs", str(runs)]) == 0
    return folder
