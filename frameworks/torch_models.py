"""LeNet and ResNet-18 in PyTorch, equal to `models/lenet.py` and `models/resnet.py`.

Modules have the names of the Keras layers. Three settings differ from PyTorch's defaults:
convolutions with stride 2 pad like TensorFlow, the moving variance of batch normalisation is
biased, and LeNet is flattened with channels last.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LeNet(nn.Module):
    """LeNet for images `(n, 1, 28, 28)`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 20, 3), nn.Conv2d(20, 50, 5)
        self.hidden, self.logits = nn.Linear(800, 128), nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits `(n, 10)`."""
        return self.head(self.features(images))

    def features(self, images: Tensor) -> Tensor:
        """Returns the output `(n, 800)` of the convolutions: height, width, channels."""
        x = F.avg_pool2d(F.relu(self.conv1(images)), 2)
        x = F.avg_pool2d(F.relu(self.conv2(x)), 2)
        return x.permute(0, 2, 3, 1).flatten(1)

    def head(self, x: Tensor) -> Tensor:
        """Returns the logits of features."""
        return self.logits(F.relu(self.hidden(x)))


class SameConv2d(nn.Conv2d):
    """A convolution of square images with the padding "same" of TensorFlow, for any stride.

    If the padding is odd, the extra row is at the end: a 3 × 3 convolution with stride 2 pads 28
    rows with 0 before and 1 after, while `padding=1` pads both sides.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Returns height and width divided by the stride, rounded up."""
        (kernel, _), (stride, _), size = self.kernel_size, self.stride, x.shape[2]
        total = max(((size + stride - 1) // stride - 1) * stride + kernel - size, 0)
        if total % 2:
            x = F.pad(x, [0, 1, 0, 1])
        return F.conv2d(x, self.weight, self.bias, self.stride, padding=total // 2)


class BatchNorm2d(nn.BatchNorm2d):
    """Batch normalisation with a biased moving variance, as in Keras.

    PyTorch divides by n to normalise, but by n - 1 for the moving variance.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-5, momentum=0.1)  # A momentum of 0.9 in Keras.
        self.num_batches_tracked = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalises by the batch and moves the statistics, or normalises by the statistics."""
        if not self.training:
            return super().forward(x)
        with torch.no_grad():
            variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance, self.momentum)
        return F.batch_norm(x, None, None, self.weight, self.bias, training=True, eps=self.eps)


class ResNet18(nn.Module):
    """ResNet-18 for images `(n, 1, 28, 28)`: the stem has stride 1 and no pooling."""

    def __init__(self, norm: type[nn.BatchNorm2d] = BatchNorm2d) -> None:
        super().__init__()
        self.stem_conv, self.stem_norm = SameConv2d(1, 64, 3), norm(64)
        inputs = 64
        for stage, width in enumerate((64, 128, 256, 512)):
            for block in (0, 1):
                name, stride = f"stage{stage}_block{block}", 2 if stage > 0 and block == 0 else 1
                self.add_module(f"{name}_conv1", SameConv2d(inputs, width, 3, stride))
                self.add_module(f"{name}_norm1", norm(width))
                self.add_module(f"{name}_conv2", SameConv2d(width, width, 3))
                self.add_module(f"{name}_norm2", norm(width))
                if stride == 2:
                    self.add_module(f"{name}_shortcut", SameConv2d(inputs, width, 1, stride))
                inputs = width
        self.logits = nn.Linear(512, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits `(n, 10)`."""
        x = F.relu(self.stem_norm(self.stem_conv(images)))
        for stage in range(4):
            for block in (0, 1):
                x = self._residual_block(x, f"stage{stage}_block{block}")
        return self.logits(x.mean((2, 3)))

    def _residual_block(self, x: Tensor, name: str) -> Tensor:
        layers = dict(self.named_children())
        y = F.relu(layers[f"{name}_norm1"](layers[f"{name}_conv1"](x)))
        y = layers[f"{name}_norm2"](layers[f"{name}_conv2"](y))
        if f"{name}_shortcut" in layers:
            x = layers[f"{name}_shortcut"](x)
        return F.relu(y + x)


def create_model(name: str) -> nn.Module:
    """Creates "lenet" or "resnet18" with kernels N(0, 0.01²) and biases 0."""
    model = LeNet() if name == "lenet" else ResNet18()
    for layer in model.children():
        if not isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)
    return model
