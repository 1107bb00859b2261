"""A Slurm of one node, in a folder of its own, from the Debian packages slurm-wlm and munge. Needs root."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

COMMANDS = ("slurmctld", "slurmd", "munged", "sbatch", "runuser")
CONFIGURATION = """
ClusterName=cdgrab
SlurmctldHost={host}
SlurmUser=root
AuthType=auth/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort=26817
SlurmdPort=26818
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/linear
MpiDefault=none
ReturnToService=2
RequeueExit=75
NodeName={host} CPUs={cores} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    missing = [command for command in COMMANDS if not shutil.which(command)]
    if missing:
        return f"not installed: {', '.join(missing)} (apt-get install slurm-wlm munge)"
    if os.geteuid():
        return "starting Slurm's daemons needs root"
    return ""


@contextlib.contextmanager
def running(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which its commands find it."""
    host = os.uname().nodename.split(".")[0]
    for name in ("state", "spool"):
        (folder / name).mkdir()
    text = CONFIGURATION.format(host=host, folder=folder, cores=os.cpu_count())
    (folder / "slurm.conf").write_text(text)
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    sockets = Path("/run/munge")
    sockets.mkdir(exist_ok=True)
    munge = pwd.getpwnam("munge")
    os.chown(sockets, munge.pw_uid, munge.pw_gid)
    daemons = [
        subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for command in (
            ["runuser", "-u", "munge", "--", "munged", "--foreground", "--force"],
            ["slurmctld", "-D"],
            ["slurmd", "-D"],
        )
    ]
    try:
        _wait_until_idle(environment, folder)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()


def _wait_until_idle(environment: dict[str, str], folder: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        asked = subprocess.run(["sinfo", "--noheader", "--format=%t"], env=environment, capture_output=True, text=True)
        if asked.stdout.strip() == "idle":
            return
        time.sleep(0.5)
    logs = "".join(path.read_text()[-1000:] for path in folder.glob("*.log"))
    raise RuntimeError(f"Slurm does not start: {asked.stdout} {asked.stderr}\n{logs}")
