"""Several hosts on one machine: each has its own name, network address, processes and shared memory.

They are Linux namespaces joined by a bridge that leads nowhere else, and see the same files, as the nodes of
a cluster see its shared file system. Needs root.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from support.mpirun import launcher

HEAD = "head"
DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
_TOOLS = ("unshare", "nsenter", "setpriv", "ip", "mount")
_SUBNET = "10.77.0"  # inside the hosts' own networks only
# Pid 1 of a host. sysfs shows the network that the one who mounts it is in, and MPI libraries look there.
_BOOT = """
set -e
hostname {name}
mount --bind {folder}/hosts /etc/hosts
mount -t tmpfs tmpfs /dev/shm
mkdir -p {folder}/cgroup
mount --rbind /sys/fs/cgroup {folder}/cgroup
mount -t sysfs sysfs /sys
mount --rbind {folder}/cgroup /sys/fs/cgroup
ip link set lo up
touch {folder}/up.{name}
exec sleep infinity
"""


def why_not() -> str | None:
    """Why there can be no hosts here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "virtual hosts need Linux and root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"virtual hosts need the programs {', '.join(missing)}"
    probe = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "true"]
    if subprocess.run(probe, capture_output=True).returncode != 0:
        return "virtual hosts need the right to make namespaces"
    return None


class Hosts:
    """Hosts n1 to nN, and `head` from which jobs start. A context manager: what runs on them ends with it."""

    def __init__(self, count: int) -> None:
        self.names = [f"n{i + 1}" for i in range(count)]
        # Short: the path of a socket in it has at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="spmd-hosts-", dir="/tmp"))
        self._boots: dict[str, subprocess.Popen[bytes]] = {}
        self._pids: dict[str, int] = {}

    def __enter__(self) -> Hosts:
        addresses = {HEAD: f"{_SUBNET}.254"}
        addresses |= {name: f"{_SUBNET}.{i + 1}" for i, name in enumerate(self.names)}
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
        (self.folder / "hosts").write_text("".join(f"{line}\n" for line in lines))
        try:
            for name in addresses:
                self._boot(name)
            self._join(addresses)
        except BaseException:
            self.close()
            raise
        self._write_rsh()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for boot in self._boots.values():
            boot.kill()  # and with it, by --kill-child, pid 1 and so all processes of a node
            boot.wait()
        self._boots = {}
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def rsh(self) -> Path:
        """A stand-in for ssh."""
        return self.folder / "rsh"

    def on(self, host: str, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on `host`, in the folder it is started from."""
        return [*self._enter(host), "env", "-C", os.getcwd(), *command]

    def limit_links(self, rate: str | None) -> None:
        """Let each node send at most at `rate`, in tc's words, such as "200mbit"; None: as fast as it can."""
        for name in self.names:
            self.check(name, "tc qdisc del dev eth0 root 2>/dev/null || true")
            if rate is not None:
                self.check(name, f"tc qdisc add dev eth0 root tbf rate {rate} burst 256kb latency 100ms")

    def mpirun(self, ranks_each: int) -> list[str]:
        """What starts ranks on all the nodes, `ranks_each` on each, when it is run on `head`."""
        program, *options = launcher()
        if options:  # Open MPI
            places = ",".join(f"{name}:{ranks_each}" for name in self.names)
            words = [*options, "--mca", "plm_ssh_agent", str(self.rsh), "--host", places]
        else:
            words = ["-launcher", "ssh", "-launcher-exec", str(self.rsh), "-hosts", ",".join(self.names)]
            words += ["-ppn", str(ranks_each)]
        return [program, *words, "-n", str(ranks_each * len(self.names))]

    def check(self, host: str, shell: str, environment: Mapping[str, str] | None = None) -> str:
        """The output of a shell line on a host; an AssertionError with all it said when it fails."""
        done = subprocess.run(
            self.on(host, ["sh", "-e", "-c", shell]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=None if environment is None else dict(environment),
            timeout=30,
        )
        assert done.returncode == 0, f"{shell!r} on {host}: exit code {done.returncode}\n{done.stdout}"
        return done.stdout

    def processes(self, host: str, word: str) -> list[int]:
        """Process ids, in the host's own counting, of the commands on it that contain `word`."""
        listing = self.check(host, "ps -e -ww -o pid=,args=")
        split = (line.split(None, 1) for line in listing.splitlines())
        return [int(pid) for pid, *rest in split if word in "".join(rest)]

    def shared_files(self, host: str) -> list[str]:
        """What is in the host's shared memory."""
        return self.check(host, "ls /dev/shm").split()

    def _enter(self, host: str) -> list[str]:
        own_processes = ["-p"] if host != HEAD else []
        return ["nsenter", "-t", str(self._pids[host]), "-n", "-u", "-i", "-m", *own_processes]

    def _boot(self, name: str) -> None:
        spaces = ["--net", "--uts", "--ipc", "--mount"]
        if name != HEAD:  # from where the other hosts are entered by their process ids
            spaces += ["--pid", "--fork", "--kill-child", "--mount-proc"]
        script = _BOOT.format(name=name, folder=self.folder)
        log = self.folder / f"boot.{name}"
        with log.open("wb") as file:
            boot = subprocess.Popen(
                [*DIE_WITH_PARENT, "unshare", *spaces, "bash", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
            )
        self._boots[name] = boot
        deadline = time.monotonic() + 10
        while not (self.folder / f"up.{name}").exists():
            alive = boot.poll() is None and time.monotonic() < deadline
            assert alive, f"host {name} does not start: {log.read_text()}"
            time.sleep(0.01)
        children = Path(f"/proc/{boot.pid}/task/{boot.pid}/children").read_text().split()
        self._pids[name] = boot.pid if name == HEAD else int(children[0])

    def _join(self, addresses: Mapping[str, str]) -> None:
        def ip(host: str, words: str) -> None:
            # In the host's network only: it is from here that the other hosts have process ids.
            enter = ["nsenter", "-t", str(self._pids[host]), "-n"]
            subprocess.run([*enter, "ip", *words.split()], check=True)

        ip(HEAD, "link add br0 type bridge")
        ip(HEAD, f"addr add {addresses[HEAD]}/24 dev br0")
        ip(HEAD, "link set br0 up")
        for name in self.names:
            ip(HEAD, f"link add to-{name} type veth peer name eth0 netns {self._pids[name]}")
            ip(HEAD, f"link set to-{name} master br0 up")
            ip(name, f"addr add {addresses[name]}/24 dev eth0")
            ip(name, "link set eth0 up")

    def _write_rsh(self) -> None:
        cases = "\n".join(f'{name}) set -- {shlex.join(self._enter(name))} "$@";;' for name in self._pids)
        self.rsh.write_text(
            "#!/bin/bash\n"
            "# rsh [-x] HOST COMMAND...\n"
            "while [[ $1 == -* ]]; do shift; done\n"
            "host=$1; shift\n"
            'set -- env -C "$PWD" /bin/sh -c "$*"\n'
            f'case $host in\n{cases}\n*) echo "rsh: no host $host" >&2; exit 255;;\nesac\n'
            'exec "$@"\n'
        )
        self.rsh.chmod(0o755)
