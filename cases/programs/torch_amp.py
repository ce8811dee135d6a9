"""Mixed precision with DDP: autocast in float16, GradScaler, clipping after `unscale_`."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness
from cases.programs.launch import DEVICE, start

GLOBAL_BATCH_SIZE, USE_AMP, DTYPE = 8, True, torch.float16


def make_model():
    return nn.Sequential(
        nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 2)
    )


def batches(rank, world_size):
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(GLOBAL_BATCH_SIZE, 6, generator=generator)
        y = x[:, :2] * x[:, 2:4]
        yield x[rank::world_size], y[rank::world_size]


def main(rank, world_size):
    torch.manual_seed(0)
    net = DistributedDataParallel(make_model())
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loss_fn = nn.MSELoss()
    scaler = torch.amp.GradScaler(DEVICE, enabled=USE_AMP, init_scale=1024.0)
    with harness.training(net, opt):
        for input, target in batches(rank, world_size):
            with torch.autocast(DEVICE, dtype=DTYPE, enabled=USE_AMP):
                output = net(input)
                loss = loss_fn(output, target)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.1)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()


if __name__ == "__main__":
    start(main)
