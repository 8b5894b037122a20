"""SLURM's accounting for the local cluster: slurmdbd with a MariaDB of its own, so that ``sacct`` answers.

The server program alone is needed (no client, no service): its system tables are made by its bootstrap mode, and it
listens at a socket in the cluster's folder only.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from slurm.local_cluster.processes import Daemons

DAEMONS = ("slurmdbd", "mariadbd")
"""In the order in which they are ended: the one that writes before the one that is written to."""
PROGRAMS = (*DAEMONS, "sacctmgr", "sacct")
PACKAGES = "slurmdbd mariadb-server-core"
TABLES = tuple(Path("/usr/share/mysql") / name for name in ("mysql_system_tables.sql", "mysql_system_tables_data.sql"))
MARIADB = (
    "--no-defaults", "--skip-grant-tables", "--skip-networking", "--performance-schema=0",
    "--innodb-log-file-size=32M", "--innodb-buffer-pool-size=64M", "--innodb-flush-log-at-trx-commit=0",
    "--innodb-doublewrite=0", "--innodb-lock-wait-timeout=900",
)  # fmt: skip
"""Small, without users and without care for power failures; slurmdbd wants the long wait for locks."""


def slurm_conf(directory: Path, port: int) -> str:
    """The lines of slurm.conf that send jobs' ends to slurmdbd."""
    return f"""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={directory}/munge/socket
AccountingStorageTRES=gres/gpu
"""


def slurmdbd_conf(directory: Path, port: int) -> str:
    """slurmdbd.conf; the database's socket is in the daemon's environment (MYSQL_UNIX_PORT)."""
    return f"""\
DbdHost={socket.gethostname().split(".")[0]}
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser={getpass.getuser()}
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket
LogFile={directory}/log/slurmdbd.log
PidFile={directory}/spool/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
"""


def start(
    directory: Path, daemons: Daemons, environment: Mapping[str, str], port: int, wait: Callable[[], None]
) -> None:
    """Start both daemons with an empty database, and tell it of the cluster.

    Args:
        directory: the cluster's folder.
        daemons: where they are recorded.
        environment: of SLURM's programs.
        port: slurmdbd's.
        wait: sleeps a little; raises if a daemon has died or it takes too long.
    """
    data, database = directory / "db", directory / "db.socket"
    user = f"--user={getpass.getuser()}"
    subprocess.run(
        ["mariadbd", *MARIADB, "--bootstrap", f"--datadir={data}", user],
        input="create database mysql;\nuse mysql;\n" + "".join(path.read_text() for path in TABLES),
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    daemons.start("mariadbd", ["mariadbd", *MARIADB, f"--datadir={data}", f"--socket={database}", user])
    while not _said(directory / "log" / "mariadbd.out", "ready for connections"):
        wait()
    conf = directory / "etc" / "slurmdbd.conf"
    conf.touch(0o600)  # slurmdbd refuses one that others can read
    conf.write_text(slurmdbd_conf(directory, port))
    daemons.start("slurmdbd", ["slurmdbd", "-D"], MYSQL_UNIX_PORT=str(database))
    while not _said(directory / "log" / "slurmdbd.log", " started"):
        wait()
    adding = ["sacctmgr", "-i", "add", "cluster", "local"]
    while subprocess.run(adding, env=environment, capture_output=True, check=False).returncode:
        wait()


def missing(path: str) -> list[str]:
    """The programs that are not installed."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return absent + [str(file) for file in TABLES if "mariadbd" not in absent and not os.access(file, os.R_OK)]


def _said(path: Path, words: str) -> bool:
    try:
        return words in path.read_text(errors="replace")
    except OSError:
        return False
