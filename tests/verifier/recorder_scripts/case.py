"""Runs the function `case_NAME` of a script in this folder: `case.py SCRIPT NAME`, on each rank."""

import importlib
import os
import sys

script = importlib.import_module(sys.argv[1])
is_rank = "RANK" in os.environ
if is_rank:
    dist = importlib.import_module("torch.distributed")
    if os.environ["RANK"] == "0":
        script.record_one_process()
    dist.init_process_group("gloo")
vars(script)[f"case_{sys.argv[2]}"]()
if is_rank:
    dist.barrier()
    os._exit(0)  # Destroying the group aborts now and then, in a thread of gloo.
