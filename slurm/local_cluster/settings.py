"""What a cluster of virtual nodes is configured with: slurm.conf and its companions as text.

Every line that is not SLURM's default is here because a cluster without systemd, cgroups, several hosts or real GPUs
does not start (or reacts too slowly for a test) without it.
"""

from __future__ import annotations

import random
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from slurm.local_cluster import accounting

NO_ACCOUNTING = "AccountingStorageType=accounting_storage/none\n"


@dataclass(frozen=True)
class ClusterShape:
    """The virtual machines; they need not exist (several nodes share this machine's cores and memory).

    ``preemption_grace_s`` is what a preempted job has between its signal and its end; ``credential_expire_s`` also
    bounds how long a requeued job waits (SLURM ignores values under 5). With ``accounting``, ``sacct`` answers.
    """

    nodes: int = 4
    cpus: int = 8
    gpus: int = 4
    memory_mb: int = 16_000
    preemption_grace_s: int = 10
    credential_expire_s: int = 5
    accounting: bool = False

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("cpus", 1), ("gpus", 0), ("memory_mb", 100)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")

    @property
    def node_names(self) -> list[str]:
        """The nodes' names: node0, node1, ..."""
        return [f"node{index}" for index in range(self.nodes)]


def free_port_block(count: int) -> int:
    """First of ``count`` free neighbouring TCP ports, below the range from which outgoing connections take theirs."""
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    last = max(10_001, min(ephemeral, 32_000) - count)
    for _ in range(200):
        first = random.randrange(10_000, last)
        sockets: list[socket.socket] = []
        try:
            for port in range(first, first + count):
                sockets.append(socket.socket())
                sockets[-1].bind(("0.0.0.0", port))
        except OSError:
            continue
        else:
            return first
        finally:
            for opened in sockets:
                opened.close()
    raise OSError(f"found no block of {count} free TCP ports between 10000 and {last}")


def slurm_conf(directory: Path, shape: ClusterShape, user: str, first_port: int) -> str:
    """slurm.conf for a cluster whose every file lies under ``directory``; ports from ``first_port`` on.

    The controller has the first, each node one, accounting the last.
    """
    last_port = first_port + 1 + shape.nodes
    storage = accounting.slurm_conf(directory, last_port) if shape.accounting else NO_ACCOUNTING
    host = socket.gethostname().split(".")[0]
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={first_port + 1 + index} CPUs={shape.cpus}"
        f" RealMemory={shape.memory_mb} State=UNKNOWN" + (f" Gres=gpu:{shape.gpus}" if shape.gpus else "")
        for index, name in enumerate(shape.node_names)
    )
    return f"""\
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={first_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={directory}/munge/socket,cred_expire={shape.credential_expire_s}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
SlurmctldPidFile={directory}/spool/slurmctld.pid
SlurmdPidFile={directory}/spool/slurmd-%n.pid
SlurmctldLogFile={directory}/log/slurmctld.log
SlurmdLogFile={directory}/log/slurmd-%n.log
PlugStackConfig={directory}/etc/plugstack.conf
MailProg=/bin/true
# One machine without cgroups or systemd.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
{storage}SwitchType=switch/none
MpiDefault=none
# Virtual nodes: believe what is written below instead of comparing it with the hardware.
SlurmdParameters=config_overrides
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
{"GresTypes=gpu" if shape.gpus else ""}
# Quick reactions, and jobs remembered for a day (there is no accounting to ask).
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0,default_queue_depth=1000
InactiveLimit=0
KillWait=3
CompleteWait=0
OverTimeLimit=0
MinJobAge=86400
MessageTimeout=20
SlurmdTimeout=10
SlurmctldTimeout=10
MaxArraySize=10001
# No number of an earlier cluster's jobs again: a sweep would take the new one for its own.
FirstJobId={int(time.time()) % 60_000_000 + 1}
# A job in "high" evicts and requeues jobs in "low"; those get their signal first.
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60 State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=low  Nodes=ALL MaxTime=INFINITE DefaultTime=60 State=UP PriorityTier=1 PreemptMode=REQUEUE \
GraceTime={shape.preemption_grace_s}
PartitionName=high Nodes=ALL MaxTime=INFINITE DefaultTime=60 State=UP PriorityTier=20 PreemptMode=OFF
"""


def gres_conf(directory: Path, shape: ClusterShape) -> str:
    """gres.conf for fake GPUs: slurmd wants character devices with distinct names, symlinks to /dev/null will do."""
    if not shape.gpus:
        return ""
    return f"NodeName=node[0-{shape.nodes - 1}] Name=gpu File={directory}/dev/gpu[0-{shape.gpus - 1}]\n"


def cgroup_conf(slurm_version: str) -> str:
    """cgroup.conf: nothing here uses cgroups, but slurmd always loads a plugin; one for "none" exists from 23.11 on."""
    year, month = (int(part) for part in slurm_version.split(".")[:2])
    return f"CgroupPlugin={'disabled' if (year, month) >= (23, 11) else 'cgroup/v1'}\n"
