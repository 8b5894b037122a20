"""The one-machine SLURM cluster: up, down, and what can go wrong on the way."""

import os
import signal
import subprocess
import sys

import pytest

from slurm import manifest
from slurm.__main__ import main
from slurm.local_cluster import ClusterShape, LocalCluster, LocalClusterError, accounting
from slurm.local_cluster.processes import start_time
from slurm.local_cluster.settings import cgroup_conf, free_port_block, gres_conf, slurm_conf
from slurm.queue import jobs
from slurm.status import sweep_status
from tests.conftest import SBIN
from tests.slurm.test_status import record, submission
from tests.slurm.test_survival import until


def test_missing_programs_are_named_with_their_packages(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("slurm.local_cluster.cluster.client_environment", lambda conf: {"PATH": str(tmp_path)})
    assert main(["local-cluster", "up", str(tmp_path / "cluster")]) == 2
    said = capsys.readouterr().err
    assert "not installed: munged" in said
    assert "apt-get install slurmctld slurmd slurm-client munge" in said


@pytest.mark.parametrize("terminal", [True, False])
def test_up_tells_a_person_how_to_use_it_and_a_shell_only_the_line(tmp_path, monkeypatch, capsys, terminal):
    monkeypatch.setattr(LocalCluster, "up", lambda self, shape: True)
    monkeypatch.setattr(LocalCluster, "nodes", lambda self: {"node0": "idle"})
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert main(["local-cluster", "up", str(tmp_path)]) == 0
    output, errors = capsys.readouterr()
    assert output.startswith("export SLURM_CONF=")
    assert output.count("\n") == 1
    assert ('# for this shell to use it: eval "$(python -m slurm local-cluster up)"' in errors) == terminal


@pytest.mark.slurm
def test_a_path_too_long_for_a_socket_is_refused(tmp_path):
    with pytest.raises(LocalClusterError, match="choose another directory"):
        LocalCluster(tmp_path / ("x" * 100)).up()


@pytest.mark.parametrize("change", [{"nodes": 0}, {"gpus": -1}, {"memory_mb": 1}])
def test_impossible_shapes(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        ClusterShape(**change)


def test_configuration_texts(tmp_path):
    text = slurm_conf(tmp_path, ClusterShape(nodes=2, gpus=0), "user", 12000)
    assert "NodeName=node1 " in text
    assert " Port=12002 " in text
    assert "Gres" not in text
    assert gres_conf(tmp_path, ClusterShape(gpus=0)) == ""
    assert "File=" in gres_conf(tmp_path, ClusterShape(gpus=2))
    assert cgroup_conf("22.05") != cgroup_conf("23.11") == cgroup_conf("24.05")


def test_ports_are_below_those_of_outgoing_connections():
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        lowest = int(file.read().split()[0])
    assert 10_000 <= free_port_block(8) <= lowest - 8


def test_a_process_that_ended_or_was_replaced_is_not_ours():
    child = subprocess.Popen(["sleep", "60"])
    started = start_time(child.pid)
    assert started is not None
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # now a zombie, not reaped yet
    assert start_time(child.pid) is None
    child.wait()
    assert start_time(child.pid) is None


@pytest.mark.slurm
def test_up_twice_a_dead_daemon_and_down_twice(tmp_path, capsys):
    cluster = LocalCluster(tmp_path / "c")
    shape = ClusterShape(nodes=2, gpus=2)
    try:
        assert cluster.up(shape)
        before = cluster.processes()
        assert sorted(before) == ["munged", "slurmctld", "slurmd-node0", "slurmd-node1"]
        assert cluster.nodes() == {"node0": "idle", "node1": "idle"}
        assert not cluster.up(shape)
        assert cluster.processes() == before

        environment = {**os.environ, "SLURM_CONF": str(cluster.slurm_conf)}
        script = "print(__import__('os').environ['CUDA_VISIBLE_DEVICES'])"
        srun = ["srun", "-N2", "-n2", "--gpus-per-node=2", sys.executable, "-c", script]
        assert subprocess.run(srun, env=environment, capture_output=True, text=True, check=True).stdout == "0,1\n0,1\n"

        os.kill(before["slurmd-node1"], signal.SIGKILL)
        while cluster.processes()["slurmd-node1"]:
            pass
        assert not cluster.is_up()
        assert main(["local-cluster", "status", str(cluster.directory)]) == 1
        assert "slurmd-node1     dead" in capsys.readouterr().out
        assert cluster.up(shape)  # replaces what was left
        assert cluster.is_up()
    finally:
        after = [process for process in cluster.processes().values() if process]
        assert cluster.down()
    assert not cluster.down()
    assert [process for process in after if start_time(process)] == []


@pytest.mark.slurm
def test_accounting_tells_how_jobs_ended_that_the_controller_has_forgotten(tmp_path, monkeypatch):
    cluster, sweep = LocalCluster(tmp_path / "c"), tmp_path / "sweep"
    sweep.mkdir()
    if missing := accounting.missing(SBIN):
        pytest.skip(f"not installed: {', '.join(missing)} (Debian: {accounting.PACKAGES})")
    try:
        cluster.up(ClusterShape(nodes=1, accounting=True))
        monkeypatch.setenv("SLURM_CONF", str(cluster.slurm_conf))
        script = "case $SLURM_ARRAY_TASK_ID in 0) ;; 1) exit 3;; 2) exec sleep 100;; esac"
        options = ["--parsable", "--array=0-3%3", "--mem=10", "-o", "/dev/null", "--wrap", script]
        job = subprocess.run(["sbatch", *options], cwd=tmp_path, capture_output=True, text=True, check=True)
        ids = [f"{job.stdout.strip()}_{task}" for task in range(4)]
        until(lambda: [found.state for found in jobs(ids).values()].count("RUNNING") == 1 and jobs(ids)[ids[3]].ended)
        subprocess.run(["scancel", ids[2]], check=True)
        until(lambda: jobs(ids)[ids[2]].ended)
        manifest.append(sweep, [submission(name, job) for name, job in zip("abcd", ids, strict=True)])
        record(sweep, "d", "finished", 1)
        asked = sweep_status(sweep)
        forgetful = tmp_path / "bin" / "squeue"
        forgetful.parent.mkdir()
        forgetful.write_text("#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2\nexit 1\n")
        forgetful.chmod(0o755)
        monkeypatch.setenv("PATH", f"{forgetful.parent}{os.pathsep}{os.environ['PATH']}")
        until(lambda: sweep_status(sweep) == asked)  # accounting lags behind by seconds
        assert [row.state for row in asked] == ["failed", "failed", "cancelled", "finished"]
        assert [row.reason for row in asked][1:] == ["", "", ""]
        assert asked[0].reason.startswith("its job ended without an error")
    finally:
        cluster.down()


@pytest.mark.slurm
def test_down_ends_running_jobs(tmp_path):
    cluster = LocalCluster(tmp_path / "c")
    cluster.up(ClusterShape(nodes=1))
    environment = {**os.environ, "SLURM_CONF": str(cluster.slurm_conf)}
    mark = tmp_path / "process"
    job = ["sbatch", "-o", "/dev/null", "--wrap", f"srun sh -c 'echo $$ >{mark}.new; mv {mark}.new {mark}; sleep 1000'"]
    try:
        subprocess.run(job, env=environment, cwd=tmp_path, capture_output=True, check=True)
        while not mark.exists():
            pass
        process = int(mark.read_text())
        assert start_time(process)
    finally:
        cluster.down()
    assert start_time(process) is None


@pytest.mark.slurm
def test_a_cluster_that_cannot_start_leaves_nothing(tmp_path, monkeypatch):
    broken = "slurm.local_cluster.settings.cgroup_conf"
    monkeypatch.setattr(broken, lambda version: "CgroupPlugin=no-such-plugin\n")
    cluster = LocalCluster(tmp_path / "c")
    with pytest.raises(LocalClusterError, match=r"did not come up: .*slurmd-node0"):
        cluster.up(ClusterShape(nodes=1))
    assert cluster.processes() == {}
