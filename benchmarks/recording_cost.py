"""Measures the cost of recording the training of a small GPT with PyTorch: times steps in turn.

python benchmarks/recording_cost.py [depth] [batch] [rounds]

The kinds: a step without a recorder; a recorded one, with what the next step does to finish it,
without modules and with all; and one that is not recorded, later in the `with` block. Needs an
interpreter with PyTorch.
"""

import pathlib
import statistics
import sys
import tempfile
import time

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from lockstep import record_torch

WIDTH, WORDS, LENGTH = 256, 1000, 64


class LanguageModel(nn.Module):
    """A GPT: embeddings of words and places, layers of causal attention, logits of words."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.word = nn.Embedding(WORDS, WIDTH)
        self.place = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 8, 4 * WIDTH, dropout=0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, nn.LayerNorm(WIDTH), False)
        self.logits = nn.Linear(WIDTH, WORDS, bias=False)
        self.mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Returns the logits, (rows, LENGTH, WORDS), of words, (rows, LENGTH)."""
        x = self.layers(self.word(words) + self.place, self.mask, is_causal=True)
        return self.logits(x)


class Training:
    """A model with one batch that it repeats."""

    def __init__(self, depth: int, batch: int) -> None:
        torch.manual_seed(0)
        self.model = LanguageModel(depth)
        self.x, self.y = torch.randint(WORDS, (2, batch, LENGTH))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> float:
        """Trains one step; returns its seconds."""
        start = time.monotonic()
        loss = F.cross_entropy(self.model(self.x).flatten(0, -2), self.y.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return time.monotonic() - start

    def steps_in_recorder(self, *, modules: bool) -> list[float]:
        """Trains three steps in a `with` block; returns their seconds, without closing the file.

        The first one is recorded. The second one finishes it and takes the hooks away.
        """
        with (
            tempfile.TemporaryDirectory() as folder,
            record_torch.record(
                f"{folder}/one.npz", self.model, self.optimizer, [0], modules=modules
            ),
        ):
            return [self.step() for _ in range(3)]


def main(depth: str = "4", batch: str = "16", rounds: str = "20") -> None:
    """Times all kinds of steps in turn and prints their ratios to a step without a recorder."""
    training = Training(int(depth), int(batch))
    for _ in range(2):
        training.step()
    ratios: dict[str, list[float]] = {}
    steps = []
    for _ in range(int(rounds)):
        for modules in (False, True):
            steps.append(training.step())
            first, second, third = (
                seconds / steps[-1] for seconds in training.steps_in_recorder(modules=modules)
            )
            kind = ", modules=True" if modules else ""
            ratios.setdefault(f"recorded{kind}", []).append(first + second - 1)
            ratios.setdefault(f"not recorded{kind}", []).append(third)
    usual = 1000 * statistics.median(steps)
    print(f"depth {depth}, batch {batch}: a step of {usual:.1f} ms")
    for name, values in ratios.items():
        low, _, high = statistics.quantiles(values)
        print(f"  {name}: {statistics.median(values):.3f} times ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main(*sys.argv[1:])
