"""Trains in PyTorch, saves a checkpoint and resumes from it; in one process, or two under DDP.

    torch_resumed.py STEPS [save=FILE] [load=FILE] [without=PART …]

A checkpoint is saved after each second step. PART is not restored, or wrongly: see `restore`.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
given = dict(word.split("=") for word in sys.argv[2:])
num_steps, lost = int(sys.argv[1]), given.get("without", "")
torch.manual_seed(0)
x, y = torch.randn(64, 8), torch.randint(8, (64,))
dropout = nn.Dropout(0.2 if "dropout" in given else 0.0)
norm = nn.Identity() if "plain" in given else nn.BatchNorm1d(8)
model = nn.Sequential(nn.Linear(8, 8), norm, nn.ReLU(), dropout, nn.Linear(8, 8))
average = {name: value.clone() for name, value in model.state_dict().items()}
if SIZE > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
    torch.manual_seed(RANK)


class Owned(torch.optim.SGD):
    """Keeps the state of each weight on the rank that updates it, and sends the weight."""

    def step(self, closure=None):
        gradients = [p.grad for p in self.param_groups[0]["params"]]
        for number, p in enumerate(self.param_groups[0]["params"]):
            p.grad = gradients[number] if number % SIZE == RANK else None
        super().step(closure)
        for number, p in enumerate(self.param_groups[0]["params"]):
            p.grad = gradients[number]
            if SIZE > 1:
                dist.broadcast(p.data, number % SIZE)


optimizer = (
    Owned(model.parameters(), lr=0.01, momentum=0.9)
    if "owned" in given
    else torch.optim.AdamW(model.parameters(), lr=0.01)
)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.5**number)
scaler = torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=1)
module = getattr(model, "module", model)


def file(name):
    return f"{name}.{RANK}"


def save():
    parts = {"model": module, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
    saved = {name: part.state_dict() for name, part in parts.items()}
    saved |= {"average": average, "step": step + 1, "random": torch.get_rng_state()}
    torch.save(saved, file(given["save"]))


def restore():
    """Restores a checkpoint but for the part that is to be lost; returns the next step."""
    saved = torch.load(file(given["load"]))
    own = saved["optimizer"]
    if lost == "buffers":
        for name in [name for name in saved["model"] if "running" in name]:
            saved["model"][name] = module.state_dict()[name]
    if lost != "model":
        module.load_state_dict(saved["model"])
    if lost == "steps":
        for state in own["state"].values():
            state["step"] = torch.tensor(0.0)
    if lost == "shard":
        other = torch.load(f"{given['load']}.{1 - RANK}")["optimizer"]
        own = other if RANK else own
    if lost == "order":
        own["state"][0], own["state"][2] = own["state"][2], own["state"][0]
    if lost != "optimizer":
        optimizer.load_state_dict(own)
    if lost != "schedule":
        schedule.load_state_dict(saved["schedule"])
        if lost == "optimizer":
            optimizer.param_groups[0]["lr"] = schedule.get_last_lr()[0]
    if lost == "extra":
        schedule.step()
    if lost == "rate":
        optimizer.param_groups[0]["lr"] = 0.01
    if lost != "scaler":
        scaler.load_state_dict(saved["scaler"])
    if lost == "average":
        saved["average"] = {name: value.clone() for name, value in module.state_dict().items()}
    average.update(saved["average"])
    if lost != "random":
        torch.set_rng_state(saved["random"])
    return saved["step"]


def examples(step):
    """Returns the examples of a step, of 8 in an epoch."""
    epoch, place = divmod(step, 4)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(epoch))
    return order[place * 16 :][:16][RANK::SIZE]


first = restore() if "load" in given else 0
with lockstep.record(model, optimizer, others={"average": average}):
    for step in range(first, num_steps):
        rows = examples(step - first if lost == "sampler" else step)
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
        with torch.no_grad():
            for name, value in module.state_dict().items():
                average[name].copy_(value if value.dtype == torch.int64 else
                                    0.9 * average[name] + 0.1 * value)  # fmt: skip
        if "save" in given and step % 2:
            save()
        if given.get("kill") == str(step):
            os.kill(os.getpid(), signal.SIGKILL)
if SIZE > 1:
    dist.destroy_process_group()
