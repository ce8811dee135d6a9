"""Trainings with PyTorch, and checks of what was recorded of them: `torch_cases.py FOLDER KIND…`.

`one` and `more` train in this process, the other kinds in several, which are forked before it has
trained: PyTorch is imported once.
"""

import os
import pathlib
import sys

import torch
import torch.distributed as dist

import torch_files as files
import torch_mesh_cases as mesh
import torch_optimizers as optimizers
import torch_ranks as ranks
import torch_replay as replay
import torch_steps as steps
from recording import run_cases

CASES = {
    "two": [ranks.case_ddp, ranks.case_bypass, ranks.case_no_sync],
    "sharded": [
        *(ranks.case_fsdp, ranks.case_owned_state, ranks.case_average_of_one_rank),
        ranks.case_mesh,
    ],
    "four": mesh.CASES,
    "one": [
        *(files.case_format, files.case_bits, replay.case_replay, files.case_gradients),
        *(steps.case_autocast, steps.case_modes, steps.case_repeated_update, steps.case_skipped),
        *(replay.case_other_optimizer, steps.case_scaled, steps.case_accumulation),
        *(steps.case_two_models, files.case_outputs, optimizers.case_two_optimizers),
        *(optimizers.case_ambiguous_optimizers, replay.case_first_step, steps.case_exception),
        *(optimizers.case_parts_of_a_model, optimizers.case_two_parts_in_turns),
        *(files.case_missing_functions, optimizers.case_nested, steps.case_wrapped_and_called_back),
        *(replay.case_replay_in_evaluation, files.case_errors, steps.case_several_closure_calls),
        *(steps.case_functions_of_gradients, replay.case_modules_of_shards, files.case_versions),
        files.case_rounding_of_a_gpu,
    ],
    "more": [
        *(replay.case_shards, replay.case_fed, replay.case_port, replay.case_tied),
        *(optimizers.case_optimizers_in_turns, optimizers.case_optimizers_in_backward),
        *(optimizers.case_averages_of_weights, replay.case_state_that_does_not_fit),
    ],
}
PROCESSES = {  # Kind → how many, and what the first one records before they find each other.
    "two": (2, None),
    "sharded": (2, ranks.record_one_process),
    "four": (4, mesh.record_one_process),
}


def run(rank, kind):
    """Runs the cases of a kind in one of its processes."""
    world_size, prepare = PROCESSES[kind]
    if prepare and rank == 0:
        prepare()
    init = f"file://{os.getcwd()}/rendezvous"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world_size)
    run_cases(CASES[kind])
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
                run, (name,), nprocs=PROCESSES[name][0], start_method="fork"
            )
        else:
            run_cases(CASES[name])
        print(f"all of {name}", flush=True)
