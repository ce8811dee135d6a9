"""Right trainings of several networks with DDP, in one process or more.

The campaign `bounds` runs this program after it has set the constants.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel

from cases import harness
from cases.programs.launch import DEVICE, start

NETWORK, GLOBAL_BATCH_SIZE, BFLOAT16, SEED = "MLP", 16, False, 0
CHANNELS, NUM_CLASSES, STEPS = 16, 10, 2


class SyncBatchNorm(nn.BatchNorm2d):
    """BatchNorm over the batches of all processes; PyTorch's own one needs a GPU."""

    def forward(self, x):
        if dist.get_world_size() == 1:
            return super().forward(x)
        whole = x.float()
        count = whole.numel() / whole.shape[1] * dist.get_world_size()
        mean = all_reduce(whole.sum((0, 2, 3))) / count
        centred = whole - mean[:, None, None]
        variance = all_reduce((centred * centred).sum((0, 2, 3))) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        return (centred * scale[:, None, None] + self.bias[:, None, None]).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """LayerNorm in float32, as autocast has it on a GPU.

    On a CPU, PyTorch adds the gradients of its weights in the dtype of its input. In bfloat16 they
    are wrong by 5 % to 60 % of their size, in another way for another size of the batch.
    """

    def forward(self, x):
        with torch.autocast(DEVICE, enabled=False):
            return super().forward(x.float())


class Sum(nn.Sequential):
    """The sum of an input and the output of layers."""

    def forward(self, x):
        return x + super().forward(x)


class MeanOfTokens(nn.Module):
    def forward(self, x):
        return x.mean(1)


def convolutions(norm, activation=nn.ReLU):
    def normalised(channels):
        return nn.Conv2d(channels, CHANNELS, 3, padding=1), norm(CHANNELS)

    layers = [*normalised(1), activation()]
    for _ in range(2):
        block = Sum(*normalised(CHANNELS), activation(), *normalised(CHANNELS))
        layers += [block, activation()]
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, NUM_CLASSES)
    return nn.Sequential(*layers, *head)


def mlp():
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, NUM_CLASSES)
    )


def transformer():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    layer.norm1, layer.norm2 = LayerNorm(32), LayerNorm(32)
    encoder = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(8, 32), encoder, MeanOfTokens(), nn.Linear(32, NUM_CLASSES))


# Name → function that builds it, shape of an example. The last bits of a batch's statistics depend
# on the order of its examples: a ReLU whose input is near 0 may then pass its gradient in only one
# of two right trainings. SiLU has no such step.
NETWORKS = {
    "MLP": (mlp, (64,)),
    "BatchNorm": (lambda: convolutions(SyncBatchNorm), (1, 12, 12)),
    "BatchNorm and SiLU": (lambda: convolutions(SyncBatchNorm, nn.SiLU), (1, 12, 12)),
    "GroupNorm": (lambda: convolutions(lambda channels: nn.GroupNorm(4, channels)), (1, 12, 12)),
    "transformer": (transformer, (12, 8)),
}


def main(rank, world_size):
    build, shape = NETWORKS[NETWORK]
    torch.manual_seed(SEED)
    model = build()
    x = torch.randn(STEPS, GLOBAL_BATCH_SIZE, *shape)
    y = torch.randint(NUM_CLASSES, (STEPS, GLOBAL_BATCH_SIZE))
    if world_size > 1:
        model = DistributedDataParallel(model)
    if SEED % 2:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with harness.training(model, optimizer):
        for inputs, targets in zip(x, y, strict=True):
            optimizer.zero_grad()
            with torch.autocast(DEVICE, torch.bfloat16, enabled=BFLOAT16):
                outputs = model(inputs[rank::world_size])
                loss = nn.functional.cross_entropy(outputs, targets[rank::world_size])
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    start(main)
