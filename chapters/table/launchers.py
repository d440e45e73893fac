"""Launchers that start a script of the book in the place of a program."""

import os
import sys
import time

from programs import die

# How a launcher starts N processes; the variables of a process's rank and of
# their number. As in comm/processes/environment.cpp.
_LAUNCHERS = [
    ("torchrun --no-python --nproc-per-node", "RANK", "WORLD_SIZE"),
    ("mpirun -n", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("jsrun -n", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    ("mpirun -n", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("flux run -n", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("mpirun -n", "PMI_RANK", "PMI_SIZE"),
    ("srun -n", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
]


def refuse_copies(command, program, options):
    """Ends the copies that a launcher has started; the first says what to start.

    They would all build at once, and give their programs files of their own.
    """
    for start, rank, size in _LAUNCHERS:
        number, count = os.environ.get(rank, ""), os.environ.get(size, "")
        if not number or not count.isdecimal() or int(count) < 2:
            continue
        if number != "0":
            time.sleep(1)  # the end of one copy may end the others
            sys.exit(2)
        name = start.partition(" ")[0]
        typed = " ".join([start, count, os.path.join("build", program),
                          *options])
        die(f"{command}: {name} has started {count} copies of this script "
            f"({size}={count}); start the program in its place: {typed}")
