"""Shadow weights follow sharded weights: towards them, and from where the training starts.

id = "averages/shadow_weights"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["ostris/ai-toolkit#1034", "m2lines/Samudra#326"]
date = "2025-08"
tags = ["fsdp2", "adam"]

[wrong.shadow_moves_away_from_weights]
title = "the shadow moves away from the weights"
place = { node = "update", step = 0, ranks = "all", tensors = ["shadow.*"] }

[wrong.shadow_is_older_than_loaded_weights]
title = "the shadow is older than the loaded weights"
place = { node = "start", step = 0, ranks = "all", tensors = ["shadow.*"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
DECAY = 0.8


class ShadowWeights:
    def __init__(self, model):
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for name, weight in model.named_parameters():
            gap = self.shadow[name] - weight
            if BUG == "shadow_moves_away_from_weights":
                self.shadow[name].add_(gap * (1 - DECAY))
            else:
                self.shadow[name].sub_(gap * (1 - DECAY))


@torch.no_grad()
def load(model):
    """Loads trained weights; here they are drawn."""
    for weight in model.parameters():
        whole = 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(8))
        if isinstance(weight, DTensor):
            whole = distribute_tensor(whole, weight.device_mesh, weight.placements)
        weight.copy_(whole)


def main():
    torch.manual_seed(6)
    model = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
    model.extend([nn.Conv1d(8, 8, 3, padding=1), nn.SiLU(), nn.Conv1d(8, 4, 1)])
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in (model[0], model[3]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if BUG == "shadow_is_older_than_loaded_weights":
        average = ShadowWeights(model)
        load(model)
    else:
        load(model)
        average = ShadowWeights(model)
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.01, eps=1e-4)
    with harness.training(model, optimizer, others={"shadow": average.shadow}):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            clean, noise = torch.randn(2, 16, 4, 10, generator=generator)[:, RANK::WORLD]
            optimizer.zero_grad()
            F.mse_loss(model(0.6 * clean + 0.8 * noise), noise - clean).backward()
            optimizer.step()
            average.update(model)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
