"""Trainings with PyTorch, and checks of what was recorded of them: `torch_cases.py FOLDER KIND…`.

`one` and `more` train in this process, the other kinds in several, which are forked before it has
trained: PyTorch is imported once.
"""

import importlib
import os
import pathlib
import sys

import torch
import torch.distributed as dist

import torch_files
import torch_later_changes as changes
import torch_optimizers
import torch_ranks as ranks
import torch_replay
import torch_steps
from recording import run_cases

MORE = (
    "shards", "port", "tied", "state_that_does_not_fit", "optimizers_in_turns",
    "optimizers_in_backward", "averages_of_weights",
)  # fmt: skip
IN_ONE_PROCESS = {
    name.removeprefix("case_"): case
    for module in (torch_replay, torch_steps, torch_optimizers, torch_files)
    for name, case in vars(module).items()
    if name.startswith("case_")
}
CASES = {
    "average": [ranks.case_average_of_one_rank],
    "rates": [torch_optimizers.case_two_rates],
    "two": [ranks.case_ddp, ranks.case_bypass, ranks.case_no_sync],
    "sharded": [
        *(ranks.case_fsdp, ranks.case_owned_state, ranks.case_passes_of_fsdp, ranks.case_mesh),
        changes.case_later_changes,
    ],
    "one": [case for name, case in IN_ONE_PROCESS.items() if name not in (*MORE, "two_rates")],
    "more": [IN_ONE_PROCESS[name] for name in MORE],
}


PROCESSES = {"average": 2, "two": 2, "sharded": 2, "four": 4}


def record_one_process(kind):
    """Records what the cases of a kind compare with, before its processes find each other."""
    if kind == "average":
        ranks.train_averaged("averaged_by_one.npz")
    elif kind == "sharded":
        ranks.record_one_process()
        changes.record_one_process()
    elif kind == "four":
        mesh_cases().record_one_process()


def mesh_cases():
    """Returns the module that needs pipelines: a recorder also has to do without these."""
    return importlib.import_module("torch_mesh_cases")


def run(rank, kind):
    """Runs the cases of a kind in one of its processes."""
    world_size = PROCESSES[kind]
    if rank == 0:
        record_one_process(kind)
    init = f"file://{os.getcwd()}/rendezvous"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world_size)
    run_cases(CASES[kind] if kind in CASES else mesh_cases().CASES)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Destroying the group aborts now and then, in a thread of gloo.


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    for name in sorted(sys.argv[2:], key=lambda name: name not in PROCESSES):
        (folder / name).mkdir()
        os.chdir(folder / name)
        if name in PROCESSES:
            torch.multiprocessing.start_processes(
                run, (name,), nprocs=PROCESSES[name], start_method="fork"
            )
        else:
            run_cases(CASES[name])
        print(f"all of {name}", flush=True)
