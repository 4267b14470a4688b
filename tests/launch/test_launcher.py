"""Which launcher started a process, from the variables that real ones were seen to set."""

from __future__ import annotations

import sys

import pytest
from support.mpirun import run

from spmd.comm.errors import UserError
from spmd.launch.launcher import HYDRA, OPEN_MPI, SRUN, Launch, check_world, find_launch, local_rank_warning


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=") for word in text.split())


STEP = "SLURM_JOB_ID=9 SLURM_NTASKS=4 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=3 SLURM_LOCALID=1"
# Under mpirun in an allocation, srun has started one daemon on each of the two nodes.
DAEMON = "SLURM_JOB_ID=9 SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1 SLURM_LOCALID=0"
HYDRA_RANK = "PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2"
OPEN_MPI_RANK = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 PMIX_RANK=3"


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        pytest.param("", None, id="by itself"),
        pytest.param("SLURM_JOB_ID=9 SLURM_NTASKS=4", None, id="in an allocation, by itself"),
        pytest.param("SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_LOCALID=0", None, id="in a batch script"),
        pytest.param(HYDRA_RANK, HYDRA, id="mpiexec"),
        pytest.param(f"{DAEMON} {HYDRA_RANK}", HYDRA, id="mpiexec in an allocation"),
        pytest.param(OPEN_MPI_RANK, OPEN_MPI, id="Open MPI"),
        pytest.param(f"{DAEMON} {OPEN_MPI_RANK}", OPEN_MPI, id="Open MPI in an allocation"),
        pytest.param(f"{STEP} PMI_RANK=3 PMI_SIZE=4 PMI_FD=11", SRUN, id="srun --mpi=pmi2"),
        pytest.param(f"{STEP} PMIX_RANK=3", SRUN, id="srun --mpi=pmix"),
        pytest.param(STEP, SRUN, id="srun --mpi=none"),
        pytest.param(
            "SLURM_NTASKS=4 SLURM_PROCID=3 SLURM_LOCALID=1 PMIX_RANK=3", SRUN, id="srun, few variables"
        ),
        pytest.param("PMI_RANK=x PMI_SIZE=4", None, id="no number"),
    ],
)
def test_launch(environment: str, launcher: str | None) -> None:
    assert find_launch(variables(environment)) == (launcher and Launch(launcher, 3, 4, 1))


def test_one_task_step_inside_an_allocation_of_four() -> None:
    shell = "SLURM_NTASKS=4 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0 SLURM_LOCALID=0"
    assert find_launch(variables(shell)) == Launch(SRUN, 0, 1, 0)


@pytest.mark.parametrize(
    ("environment", "library", "words"),
    [
        (STEP, "MPICH", ["srun started 4 ranks", "is MPICH", "srun --mpi=pmi2"]),
        (f"{STEP} PMI_RANK=3 PMI_SIZE=4", "Open MPI", ["srun started 4 ranks", "srun --mpi=pmix"]),
        (STEP, "Intel MPI", ["srun --mpi=pmi2", "I_MPI_PMI_LIBRARY"]),
        (STEP, "Some MPI", ["srun --mpi=pmi2 or srun --mpi=pmix"]),
        (HYDRA_RANK, "Open MPI", ["mpiexec", "started 4 ranks", "mpirun that belongs to Open MPI"]),
        (OPEN_MPI_RANK, "MPICH", ["Open MPI's mpirun started 4 ranks", "mpirun that belongs to MPICH"]),
    ],
)
def test_ranks_that_did_not_find_each_other(environment: str, library: str, words: list[str]) -> None:
    launch = find_launch(variables(environment))
    with pytest.raises(UserError) as refused:
        check_world(launch, 1, library)
    for word in words:
        assert word in str(refused.value)
    check_world(launch, 4, library)


@pytest.mark.parametrize("environment", ["", "SLURM_NTASKS=4 SLURM_PROCID=0", "PMI_RANK=0 PMI_SIZE=1"])
def test_one_rank_that_was_meant_to_be_one(environment: str) -> None:
    check_world(find_launch(variables(environment)), 1, "MPICH")


def test_places_on_the_node() -> None:
    launch = Launch(SRUN, 0, 4, 0)
    assert local_rank_warning(launch, [(0, 0), (1, 1), (0, 0), (1, 1)]) is None
    assert local_rank_warning(launch, [(None, 0), (None, 1)]) is None
    assert local_rank_warning(None, [(None, 0)]) is None
    warning = local_rank_warning(launch, [(0, 0), (1, 0), (2, 0)])
    assert warning is not None
    assert "rank 1 is number 1 on its node to srun, but number 0" in warning


@pytest.mark.parametrize(("program", "task"), [("command", 0), ("command", 1), ("script", 0)])
def test_a_lone_rank_of_two_is_refused_once(program: str, task: int) -> None:
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)}
    words = ["-m", "spmd.run", "--prompt", "x", "--model", "nowhere"]
    if program == "script":
        words = ["-c", "from spmd import LLM; LLM('nowhere', tp=2)"]
    done = run([sys.executable, *words], 60, environment=step)
    assert done.code == 2, done.output
    assert "Traceback" not in done.stderr
    assert done.stderr.count("spmd: error: srun started 2 ranks, but each is alone") == (task == 0)
    assert done.stderr.count("\n") == (task == 0), done.output
