"""A learned codebook outside of the wrapped model starts and trains from one rank's vectors.

id = "averages/vq_learned"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["lucidrains/vector-quantize-pytorch#222", "lucidrains/vector-quantize-pytorch#25"]
date = "2025-08"
tags = ["gathered", "adam", "sgd"]

[wrong.gradients_of_codebook_are_not_reduced]
title = "gradients of the codebook are not reduced"
place = { node = "sum", step = 0, ranks = "all", tensors = ["codes"] }

[wrong.rank_0_gradient_of_codebook]
title = "rank 0's gradient of the codebook"
place = { node = "sum", step = 0, ranks = "all", tensors = ["codes"] }

[wrong.clusters_of_own_vectors]
title = "clusters of the own vectors"
place = { node = "start", step = 0, ranks = "all", tensors = ["codes"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
CODES, WIDTH = 5, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.codes = nn.Parameter(torch.zeros(CODES, WIDTH))

    def forward(self, x):
        z = self.encoder(x)
        quantised = self.codes[torch.cdist(z, self.codes).argmin(-1)]
        output = self.decoder(z + (quantised - z).detach())
        return output, F.mse_loss(quantised, z.detach()), F.mse_loss(z, quantised.detach())


@torch.no_grad()
def cluster(model, x, rounds=3):
    """Lloyd's algorithm from evenly spaced vectors, sorted by their first feature."""
    z, is_own = model.encoder(x), WORLD == 1 or BUG == "clusters_of_own_vectors"
    if not is_own:
        parts = [torch.empty_like(z) for _ in range(WORLD)]
        dist.all_gather(parts, z)
        z = torch.cat(parts)
    z = z[z[:, 0].argsort()]
    means = z[torch.linspace(0, len(z) - 1, CODES).long()]
    for _ in range(rounds):
        chosen = F.one_hot(torch.cdist(z, means).argmin(-1), CODES).float()
        means = chosen.T @ z / chosen.sum(0).clamp(min=1)[:, None]
    model.codes.copy_(means)


def reduce_gradients(model):
    for name, weight in model.named_parameters():
        if name == "codes" and BUG == "gradients_of_codebook_are_not_reduced":
            continue
        if name == "codes" and BUG == "rank_0_gradient_of_codebook":
            dist.broadcast(weight.grad, 0)
            continue
        dist.all_reduce(weight.grad, op=dist.ReduceOp.SUM)
        weight.grad /= WORLD


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 24, 8)[:, RANK::WORLD]
    cluster(model, x[0])
    of_codes = torch.optim.SGD([model.codes], lr=0.5)
    others = [p for n, p in model.named_parameters() if n != "codes"]
    optimizer = torch.optim.AdamW(others, lr=0.01)
    with harness.training(model, [optimizer, of_codes]):
        for part in x[1:]:
            output, of_codebook, commitment = model(part)
            loss = F.mse_loss(output, part) + of_codebook + 0.25 * commitment
            optimizer.zero_grad()
            of_codes.zero_grad()
            loss.backward()
            if WORLD > 1:
                reduce_gradients(model)
            of_codes.step()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
