"""A real Slurm over virtual hosts: its controller on `head`, one daemon on each node."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from support.cluster.hosts import DIE_WITH_PARENT, HEAD, Hosts
from support.cluster.hosts import why_not as why_no_hosts
from support.mpirun import Finished, clean_environment, run

_DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
_CONF = """
ClusterName=virtual
SlurmctldHost=head(10.77.0.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1
MpiDefault=pmi2
ReturnToService=2
KillWait=5
SlurmdParameters=config_overrides
TmpFS={folder}/tmp/%n
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld
SlurmdLogFile={folder}/log/slurmd.%n
NodeName=n[1-{nodes}] NodeAddr=10.77.0.[1-{nodes}] CPUs={cpus} RealMemory=4000
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why there can be no Slurm here, or None."""
    # Debian keeps daemons out of a user's PATH.
    places = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    missing = [name for name in _DAEMONS if shutil.which(name, path=places) is None]
    if missing:
        return (
            f"Slurm is not installed ({', '.join(missing)}): "
            "apt-get install slurmctld slurmd slurm-client munge"
        )
    return why_no_hosts()


class Slurm:
    """A cluster of `nodes` nodes with `cpus` cores each (as far as Slurm knows). A context manager."""

    def __init__(self, nodes: int, cpus: int) -> None:
        self.hosts = Hosts(nodes)
        self._folder = self.hosts.folder
        self._conf = _CONF.format(folder=self._folder, nodes=nodes, cpus=cpus)
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def environment(self) -> dict[str, str]:
        """Variables for `sbatch` and the like."""
        return clean_environment({"SLURM_CONF": str(self._folder / "slurm.conf")})

    def __enter__(self) -> Slurm:
        self.hosts.__enter__()
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()
        self.hosts.close()

    def on_head(
        self, command: Sequence[str], timeout_s: float = 60.0, environment: Mapping[str, str] | None = None
    ) -> Finished:
        """Run a command on the head node, with a time limit."""
        return run(
            self.hosts.on(HEAD, command), timeout_s, environment={**self.environment, **(environment or {})}
        )

    def query(self, shell: str) -> str:
        return self.hosts.check(HEAD, shell, self.environment)

    def state(self, job: int) -> str:
        """The job's state in Slurm's words, such as RUNNING; "" once Slurm has forgotten it."""
        return self.query(f"squeue -h -t all -j {job} -o %T 2>/dev/null || true").strip()

    def wait(self, job: int, states: Sequence[str], timeout_s: float) -> str:
        """Wait until the job is in one of `states`, and return it."""
        deadline = time.monotonic() + timeout_s
        while (state := self.state(job)) not in states:
            assert time.monotonic() < deadline, f"job {job} is {state}, not {states}, after {timeout_s} s"
            time.sleep(0.1)
        return state

    def exit_code(self, job: int) -> str:
        """The job's exit code as `code:signal`."""
        words = self.query(f"scontrol show job {job}").split()
        return next(word.partition("=")[2] for word in words if word.startswith("ExitCode="))

    def _start(self) -> None:
        folder, nodes = self._folder, self.hosts.names
        folder.chmod(0o755)
        for name in (
            "munge",
            "run",
            "log",
            "state",
            *(f"{part}/{n}" for part in ("spool", "tmp") for n in nodes),
        ):
            (folder / name).mkdir(parents=True)
        (folder / "munge").chmod(0o711)
        (folder / "munge" / "key").write_bytes(os.urandom(1024))
        (folder / "munge" / "key").chmod(0o600)
        conf = folder / "slurm.conf"
        conf.write_text(self._conf)
        munge = {
            "key-file": "key",
            "socket": "socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        paths = [f"--{option}={folder}/munge/{name}" for option, name in munge.items()]
        self._daemon(HEAD, "munged", "--foreground", "--force", *paths)
        self._until(lambda: (folder / "munge" / "socket").exists(), "munged")
        self._daemon(HEAD, "slurmctld", "-D", "-f", str(conf))
        for name in nodes:
            self._daemon(name, "slurmd", "-D", "-f", str(conf), "-N", name)
        idle = "sinfo -h -N -t idle -o %N 2>/dev/null || true"
        self._until(lambda: len(self.query(idle).split()) == len(nodes), "Slurm's nodes")

    def _daemon(self, host: str, *command: str) -> None:
        with (self._folder / "log" / f"{command[0]}.{host}.out").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    [*DIE_WITH_PARENT, *self.hosts.on(host, command)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**self.environment, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
                    start_new_session=True,
                )
            )

    def _until(self, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 20
        while not ready():
            if time.monotonic() > deadline:
                logs = "\n".join(
                    f"{p.name}: {p.read_text()[-1500:]}" for p in Path(self._folder / "log").iterdir()
                )
                raise AssertionError(f"{what} did not start\n{logs}")
            time.sleep(0.05)
