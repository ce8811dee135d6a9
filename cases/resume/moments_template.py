"""A checkpoint is loaded into the state of a new optimizer, which has no moments yet.

id = "resume/moments_template"
framework = "torch"
processes = 2
steps = 4
mode = "resume"
references = ["KempnerInstitute/KempnerForge#115", "NVIDIA-NeMo/Megatron-Bridge#3832"]
date = "2026-05"
tags = ["fsdp2", "adam"]

[wrong.new_optimizer_state_is_template]
title = "a new optimizer's state is the template"
place = { node = "start", step = 2, ranks = "all", tensors = "all" }

[wrong.step_count_starts_again]
title = "the step count starts again"
place = { node = "start", step = 2, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cases import harness

BUG = os.environ.get("BUG", "")
SAVE, LOAD = os.environ.get("SAVE"), os.environ.get("LOAD")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STEPS, HALF, BATCH = 4, 2, 8


class Trainer:
    def __init__(self):
        torch.manual_seed(5)
        self.model = nn.Sequential(
            nn.Linear(10, 24), nn.SiLU(), nn.LayerNorm(24), nn.Linear(24, 16), nn.SiLU()
        )
        self.model.append(nn.Linear(16, 3))
        if WORLD > 1:
            dist.init_process_group("gloo")
            mesh = init_device_mesh("cpu", (WORLD,))
            fully_shard(self.model[3], mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, eps=1e-4)

    def state(self):
        if BUG == "new_optimizer_state_is_template":
            return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, path):
        dcp.save(self.state(), checkpoint_id=path + ".dcp", no_dist=WORLD == 1)

    def load(self, path):
        state = self.state()
        dcp.load(state, checkpoint_id=path + ".dcp", no_dist=WORLD == 1)
        if BUG == "new_optimizer_state_is_template":
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            return
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        if BUG == "step_count_starts_again":
            for values in self.optimizer.state.values():
                values["step"].zero_()

    def train(self, steps):
        for step in steps:
            data = torch.Generator().manual_seed(step)
            x = torch.randn(BATCH, 10, generator=data)
            y = x[:, :3].argmax(1)
            self.optimizer.zero_grad()
            logits = self.model(x[RANK::WORLD])
            nn.functional.cross_entropy(logits, y[RANK::WORLD]).backward()
            self.optimizer.step()


trainer = Trainer()
if LOAD:
    trainer.load(LOAD)
with harness.training(trainer.model, trainer.optimizer):
    trainer.train(range(HALF if LOAD else 0, HALF if SAVE else STEPS))
if SAVE:
    trainer.save(SAVE)
if WORLD > 1:
    dist.destroy_process_group()
