"""A real Slurm of one node, on loopback, without installing anything: for tests as root.

The packages are fetched with apt and unpacked into a cache; where that is not possible, `Missing`
says why.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_PACKAGES = [
    "libhwloc15",
    "liblua5.1-0",
    "libmunge2",
    "munge",
    "slurm-wlm-basic-plugins",
    "slurm-client",
    "slurmd",
    "slurmctld",
]
_START_S = 300.0
PATIENCE_S = 900.0
"""Whatever takes longer hangs: machines that are busy with other tests are slow."""
_CONFIG = """\
ClusterName=moebatch
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A job that is queued again waits for as long as its credential is good: two minutes elsewhere.
AuthInfo=socket={run}/munge/socket,cred_expire=10
CredType=cred/munge
PluginDir={plugins}
StateSaveLocation={run}/state
SlurmdSpoolDir={run}/spool
SlurmctldPidFile={run}/slurmctld.pid
SlurmdPidFile={run}/slurmd.pid
SlurmctldLogFile={run}/slurmctld.log
SlurmdLogFile={run}/slurmd.log
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=15
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=4000 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


class Missing(Exception):
    """No cluster can be had here; says why."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster that runs."""

    environment: Mapping[str, str]
    folder: Path

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """What a command prints. Raises AssertionError with all of it if it fails."""
        done = subprocess.run(
            command,
            env=dict(self.environment),
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def states(self, job: str) -> list[str]:
        """Of a job, or of each task of an array, as Slurm calls them: PENDING, RUNNING, …"""
        shown = self.run("scontrol", "show", "job", job, "--oneliner")
        return [_field(line, "JobState") for line in shown.splitlines()]

    def field(self, job: str, name: str) -> str:
        """One of what ``scontrol show job`` says of a job or a task."""
        return _field(self.run("scontrol", "show", "job", job, "--oneliner"), name)

    def wait(self, job: str) -> list[str]:
        """The states in which a job and its tasks have ended."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            states = self.states(job)
            if not {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SIGNALING"} & set(states):
                return states
            time.sleep(0.5)
        raise AssertionError(f"job {job} is still {self.states(job)}: {self.run('squeue')}")


@contextmanager
def one_node_cluster(folder: Path, cache: Path) -> Iterator[Cluster]:
    """A cluster while the block runs; its files are in `folder`, its programs in `cache`. Raises
    Missing."""
    root = _programs(cache)
    run = folder / "slurm"
    for name in ("state", "spool", "munge"):
        (run / name).mkdir(parents=True)
    (run / "munge").chmod(0o700)
    libraries = root / "usr/lib/x86_64-linux-gnu"
    host = socket.gethostname().split(".")[0]
    config = run / "slurm.conf"
    config.write_text(
        _CONFIG.format(
            host=host,
            run=run,
            plugins=libraries / "slurm-wlm",
            ports=_free_ports(2),
            cpus=os.cpu_count(),
        )
    )
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": f"{libraries}:{libraries / 'slurm-wlm'}",
        "SLURM_CONF": str(config),
        "PATH": f"{root / 'usr/bin'}:{os.environ['PATH']}",
    }
    cluster = Cluster(environment=environment, folder=run)
    with _daemons(root, run, environment):
        _wait_until_idle(cluster)
        yield cluster


@contextmanager
def _daemons(root: Path, run: Path, environment: Mapping[str, str]) -> Iterator[None]:
    munge = run / "munge"
    key = munge / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    files = {"key-file": "key", "socket": "socket", "log-file": "log", "seed-file": "seed"}
    options = [f"--{option}={munge / name}" for option, name in files.items()]
    sbin = root / "usr/sbin"
    # In the foreground, so that they are ours to end.
    commands = [
        [sbin / "munged", "--foreground", "--force", f"--pid-file={munge / 'pid'}", *options],
        [sbin / "slurmctld-wlm", "-D", "-f", run / "slurm.conf"],
        [sbin / "slurmd-wlm", "-D", "-f", run / "slurm.conf", "-d", sbin / "slurmstepd-wlm"],
    ]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with (run / f"{Path(command[0]).name}.out").open("wb") as log:
                started.append(
                    subprocess.Popen(command, env=dict(environment), stdout=log, stderr=log)
                )
            time.sleep(1.0)
        yield
    finally:
        for process in reversed(started):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_idle(cluster: Cluster) -> None:
    end = time.monotonic() + _START_S
    said = ""
    while time.monotonic() < end:
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%t"],
            env=dict(cluster.environment),
            capture_output=True,
            text=True,
        )
        said = done.stdout.strip() or done.stderr.strip()
        if said == "idle":
            return
        time.sleep(0.5)
    raise Missing(f"the cluster does not come up: {said}")


def _programs(cache: Path) -> Path:
    """Where the packages are unpacked; they are fetched once."""
    root = cache / "root"
    if (root / "usr/sbin/slurmd-wlm").exists():
        return root
    if os.geteuid() != 0:
        raise Missing("only root can start a Slurm without installing it")
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise Missing("its packages are fetched with apt-get, which is not here")
    draft = cache / f"draft-{os.getpid()}"
    draft.mkdir(parents=True)
    fetched = subprocess.run(
        ["apt-get", "download", *_PACKAGES], cwd=draft, capture_output=True, text=True
    )
    if fetched.returncode:
        shutil.rmtree(draft)
        raise Missing(f"its packages cannot be fetched: {fetched.stderr.strip()[-200:]}")
    for package in draft.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, draft / "root"], check=True)
    (draft / "root").rename(root)
    shutil.rmtree(draft)
    return root


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _field(line: str, name: str) -> str:
    for part in line.split():
        if part.startswith(f"{name}="):
            return part.removeprefix(f"{name}=")
    raise AssertionError(f"no {name} in: {line}")
