"""A small GPT in a pipeline of two stages, with DDP over "dp"; the embedding is the head."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from cases import harness
from cases.programs.gpt_parts import GPT, LAYERS, cross_entropy, get_batch
from cases.programs.launch import DEVICE, start

SEED, BFLOAT16, MAX_NORM = 0, False, 0.5
STAGES, MICRO_BATCHES = 2, 2
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
SCHEDULE = "GPipe"


class Model(GPT):
    def __init__(self):
        super().__init__()
        self.head.weight = self.tokens.weight  # Tied.

    def forward(self, x, positions):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=BFLOAT16):
            return super().forward(x, positions).float()


def take_stage(model, stage):
    """Removes the modules of other stages; the tied weight is on the first and the last."""
    for number in range(LAYERS):
        if number * STAGES // LAYERS != stage:
            del model.layers[str(number)]
    if stage == 0:
        model.norm = model.head = None
    if stage == STAGES - 1:
        model.tokens = model.positions = None
    return model


def tied_gradient(model):
    return (model.head if model.tokens is None else model.tokens).weight.grad


def clip_gradients(model, mesh, stage):
    """Clips by the norm over all stages; the tied weight counts once."""
    gradients = [p.grad for p in model.parameters()]
    counted = [g for g in gradients if g is not tied_gradient(model) or stage == 0]
    total = sum(g.square().sum() for g in counted)
    dist.all_reduce(total, group=mesh["pp"].get_group())
    nn.utils.clip_grads_with_norm_(model.parameters(), MAX_NORM, total.sqrt())


def train_pipeline(model, optimizer, mesh, batch):
    stage, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    tokens, positions, targets = batch
    pipeline = PipelineStage(model, stage, STAGES, torch.device(DEVICE), group=group)
    schedule = SCHEDULES[SCHEDULE](pipeline, MICRO_BATCHES, loss_fn=cross_entropy)
    if stage == 0:
        schedule.step(tokens, positions=positions)
    else:
        schedule.step(target=targets, positions=positions)
    dist.all_reduce(tied_gradient(model), group=group)
    if mesh["dp"].size() > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad, dist.ReduceOp.AVG, mesh["dp"].get_group())
    clip_gradients(model, mesh, stage)
    optimizer.step()
    optimizer.zero_grad()


def train(model, optimizer, batch):
    tokens, positions, targets = batch
    cross_entropy(model(tokens, positions), targets).backward()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()


def main(rank, world_size):
    torch.manual_seed(SEED)
    pp_size = min(world_size, STAGES)
    mesh = init_device_mesh(DEVICE, (world_size // pp_size, pp_size), mesh_dim_names=("dp", "pp"))
    model = Model()
    if world_size > 1:
        model = take_stage(model, mesh["pp"].get_local_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5, weight_decay=0.1)
    names = {"head.weight": "tokens.weight"} if world_size > 1 else None
    with harness.training(model, optimizer, mesh=mesh, names=names, modules=True):
        for step in range(3):
            batch = [x.chunk(mesh["dp"].size())[rank // pp_size] for x in get_batch(step, SEED)]
            if world_size > 1:
                train_pipeline(model, optimizer, mesh, batch)
            else:
                train(model, optimizer, batch)


if __name__ == "__main__":
    start(main)
