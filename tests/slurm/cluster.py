"""A SLURM of two nodes on this host: munge, the controller and two node daemons, in a folder of its own."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "sinfo", "squeue", "setpriv")
NODES = ("n1", "n2")
PATIENCE_S = 120.0  # of a busy machine

CONFIG = """\
ClusterName=runahead
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
# What needs cgroups is off; a step's processes are found by their parents.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
KillWait=60
MinJobAge=600
# Ranks without torchrun meet at a port that follows from the number of the job: not that of another cluster's.
FirstJobId={first_job}
# The nodes have the processors that are written here, whatever this host has.
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1_port} CPUs=8 RealMemory=1000 Gres=gpu:2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={n2_port} CPUs=8 RealMemory=1000 Gres=gpu:2
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""

# Any two device files stand for a node's GPUs: without cgroups SLURM only counts them.
GPUS = "".join(f"NodeName={node} Name=gpu File={file}\n" for node in NODES for file in ("/dev/null", "/dev/zero"))


class Cluster:
    """The daemons, and the commands of a user. Leaving the block ends all jobs and every process that it started.

    Args:
        folder: an empty one, whose path is short enough for a socket.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))}
        self.environment = kept | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        """Raises: TimeoutError if SLURM does not come up."""
        names: dict[str, object] = {"folder": self.folder, "host": socket.gethostname().partition(".")[0]}
        names["first_job"] = 1 + secrets.randbelow(1_000_000)
        names |= dict(zip(("controller_port", "n1_port", "n2_port"), free_ports(3), strict=True))
        (self.folder / "slurm.conf").write_text(CONFIG.format(**names))
        (self.folder / "gres.conf").write_text(GPUS)
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        files = {"socket": "munge.socket", "key-file": key.name, "pid-file": "munged.pid"}
        files |= {"log-file": "munged.log", "seed-file": "munge.seed"}
        munge = [f"--{option}={self.folder / name}" for option, name in files.items()]
        idle = "".join(f"{node} idle\n" for node in NODES)
        try:
            self._start("munged", "munged", "--foreground", "--force", *munge)
            wait_until((self.folder / "munge.socket").exists, "munge")
            self._start("slurmctld", "slurmctld", "-D")
            for node in NODES:
                self._start(node, "slurmd", "-D", "-N", node)
            wait_until(lambda: self.ask("sinfo", "-N", "-h", "-o", "%N %t") == idle, "two idle nodes", 20)
        except BaseException:
            self._end_daemons()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.ask("scancel", "--user=root")
            wait_until(lambda: not self.ask("squeue", "-h"), "the end of all jobs")
        finally:
            self._end_daemons()

    def _start(self, name: str, *command: str) -> None:
        # If the tests are killed, their daemons end as well.
        with (self.folder / f"{name}.out").open("wb") as out:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig=TERM", *command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=self.folder,
            )

    def _end_daemons(self) -> None:
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def ask(self, *command: str) -> str:
        """Standard output of a command, whether it succeeds or not."""
        return self.run(*command).stdout

    def run(self, *command: str | Path, folder: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        """A command of a user, in a folder, with more environment."""
        return subprocess.run(
            [*map(str, command)],
            env=self.environment | more,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
        )

    def submit(self, *arguments: str | Path, folder: Path, **more: str) -> Job:
        """sbatch, as `run`."""
        done = self.run("sbatch", "--parsable", *arguments, folder=folder, **more)
        assert done.returncode == 0, done.stderr
        return Job(self, int(done.stdout), folder)

    def processes(self, **variables: str) -> list[int]:
        """Everything that runs below the daemons with such variables in its environment."""
        variables |= {"SLURM_CONF": self.environment["SLURM_CONF"]}
        wanted = {f"{name}={value}" for name, value in variables.items()}
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and wanted <= set((entry / "environ").read_text(errors="replace").split("\0")):
                    found.append(int(entry.name))
            except OSError:  # it has just ended
                continue
        return found


class Job:
    """A batch job; `folder` is where it was submitted."""

    def __init__(self, cluster: Cluster, number: int, folder: Path) -> None:
        self._cluster, self.number, self.folder = cluster, number, folder

    def field(self, name: str) -> str:
        """Value of a field of `scontrol show job`, such as JobState."""
        words = self._cluster.ask("scontrol", "show", "job", "-o", str(self.number)).split()
        return next((word.partition("=")[2] for word in words if word.startswith(f"{name}=")), "")

    @property
    def ended(self) -> bool:
        return self.field("JobState") not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")

    def wait(self) -> tuple[str, int]:
        """State and exit status, once SLURM has seen the last of it."""
        wait_until(lambda: self.ended, f"the end of job {self.number}", 2 * PATIENCE_S)
        return self.field("JobState"), int(self.field("ExitCode").partition(":")[0])

    def processes(self, node: str | None = None) -> list[int]:
        """Everything of it that runs, on all nodes or on one."""
        of_node = {} if node is None else {"SLURMD_NODENAME": node}
        return self._cluster.processes(SLURM_JOB_ID=str(self.number), **of_node)

    def start_again(self) -> None:
        """Once the job waits in the queue again: now, rather than in two minutes."""
        wait_until(lambda: self.ended or self.field("JobState") == "PENDING", f"job {self.number} in the queue")
        # SLURM takes what a daemon of the first start still has to say for news of the second.
        names = f"slurmstepd: [{self.number}."
        running = [f"{entry}/cmdline" for entry in map("/proc/{}".format, self._cluster.processes())]
        wait_until(lambda: not any(text_of(path).startswith(names) for path in running), "the end of the first start")
        time.sleep(10)  # what it said last may still be on its way
        self._cluster.ask("scontrol", "update", f"jobid={self.number}", "StartTime=now")

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob(f"*-{self.number}.log"))


def text_of(path: str) -> str:
    """Content of a file that may be gone by now."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def wait_until(ready: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Raises: TimeoutError."""
    deadline = time.monotonic() + patience_s
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {patience_s:g} s for {what}")
        time.sleep(0.1)
