"""What started this process, told from environment variables, and whether its ranks found each other."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from spmd.comm.errors import UserError

OPEN_MPI, HYDRA, SRUN = "Open MPI's mpirun", "mpiexec (MPICH's or Intel MPI's)", "srun"
# By mpi4py's name of the library. Each may be built otherwise.
_MATCHING_SRUN = {"Open MPI": "--mpi=pmix", "MPICH": "--mpi=pmi2", "Intel MPI": "--mpi=pmi2"}


@dataclass(frozen=True)
class Launch:
    """What a launcher meant this process to be: `rank` of `size`, and which on its node (if it told)."""

    launcher: str
    rank: int
    size: int
    local_rank: int | None


def find_launch(environment: Mapping[str, str]) -> Launch | None:
    """The launch that this process's variables describe; None for a program started by itself.

    The launcher nearest to the process counts: under mpirun inside a Slurm allocation, SLURM_PROCID and
    SLURM_LOCALID are those of mpirun's own daemon. A batch script, and what it starts without srun, has
    SLURM_PROCID and SLURM_NTASKS too, but not the variables of a job step.
    """

    def number(name: str) -> int | None:
        try:
            return int(environment[name])
        except (KeyError, ValueError):
            return None

    rank, size = number("OMPI_COMM_WORLD_RANK"), number("OMPI_COMM_WORLD_SIZE")
    if rank is not None and size is not None:
        return Launch(OPEN_MPI, rank, size, number("OMPI_COMM_WORLD_LOCAL_RANK"))
    task, tasks = number("SLURM_PROCID"), number("SLURM_STEP_NUM_TASKS")
    if tasks is None and "PMIX_RANK" in environment:
        tasks = number("SLURM_NTASKS")
    rank, size = number("PMI_RANK"), number("PMI_SIZE")
    if rank is not None and size is not None and (rank, size) != (task, tasks):
        return Launch(HYDRA, rank, size, number("MPI_LOCALRANKID"))
    if task is not None and tasks is not None:
        return Launch(SRUN, task, tasks, number("SLURM_LOCALID"))
    return None


def check_world(launch: Launch | None, world_size: int, library: str) -> None:
    """Raise `UserError` when a launcher started several ranks and each of them is alone in its MPI world.

    library: the loaded MPI library's name, as `mpi4py.MPI.get_vendor()` gives it.
    """
    if launch is None or launch.size == 1 or world_size != 1:
        return
    if launch.launcher == SRUN:
        fitting = _MATCHING_SRUN.get(library, "--mpi=pmi2 or srun --mpi=pmix")
        advice = (
            f"try srun {fitting} (srun --mpi=list shows what this Slurm has), or mpirun of that library "
            "inside the allocation"
        )
        if library == "Intel MPI":
            advice += "; Intel MPI also wants I_MPI_PMI_LIBRARY to name Slurm's libpmi2.so"
    else:
        advice = (
            f"start it with the mpirun that belongs to {library}, or install mpi4py for the launcher's MPI"
        )
    raise UserError(
        f"{launch.launcher} started {launch.size} ranks, but each is alone in an MPI world of 1: the loaded "
        f"library is {library}, which did not understand the launcher; {advice}"
    )


def require_whole_world(environment: Mapping[str, str]) -> None:
    """`check_world` for this process, with the message on one rank only: the others leave with code 2."""
    from mpi4py import MPI

    launch = find_launch(environment)
    try:
        check_world(launch, MPI.COMM_WORLD.size, MPI.get_vendor()[0])
    except UserError:
        if launch is not None and launch.rank == 0:
            raise
        sys.exit(2)


def local_rank_warning(launch: Launch | None, node_ranks: list[tuple[int | None, int]]) -> str | None:
    """What is odd about the ranks' places on their nodes, or None.

    node_ranks: for each rank, what the launcher calls its place on the node (None: not told) and its place
    among the ranks that share memory, which is what devices and cores are chosen by.
    """
    for rank, (told, found) in enumerate(node_ranks):
        if launch is not None and told is not None and told != found:
            return (
                f"rank {rank} is number {told} on its node to {launch.launcher}, but number {found} among "
                "the ranks it shares memory with, by which it gets its device and cores; containers that do "
                "not share /dev/shm are a usual cause"
            )
    return None


def _print_srun_option() -> None:
    """For batch scripts: the option of srun that suits the MPI library found here, or nothing."""
    import mpi4py

    mpi4py.rc.initialize = False  # this process is no rank
    from mpi4py import MPI

    print(_MATCHING_SRUN.get(MPI.get_vendor()[0], ""))


if __name__ == "__main__":
    _print_srun_option()
