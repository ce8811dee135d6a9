"""Oracles: who can say what is right."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from lockstep.numeric.arrays import Named

Batch = list[np.ndarray]  # Leaves of the examples: inputs, targets and sample weights.
OtherSetting = tuple[str, str, dict[str, Any]]  # Cause, text, other settings of the optimizer.


class Ask(NamedTuple):
    """A step of one shard to compute on one device, without the update.

    Attributes:
        state: all variables before the step.
        data: the examples.
        scales: factors of the data loss and of regularisation.
        starts: start of the backward pass by each prediction, in place of the gradient of the loss.
        replica: number of the replica that the code sees.
        off: indices of the layers to compute in inference mode.
        short: indices of the layers whose outputs are rounded, and the dtype, such as bfloat16.
        parts: the steps of the shards that make up `data`: layers that do not synchronise use
            their seeds, statistics and replica numbers.
        at_once: whether layers that synchronise see the whole batch, in place of one shard after
            the other, with the sums over all of them.
        noise: relative change of each number that a layer returns, and seed of its sign.
    """

    state: Named
    data: Batch
    scales: tuple[float, float] = (1.0, 1.0)
    starts: list[np.ndarray] | None = None
    replica: int = 0
    off: tuple[int, ...] = ()
    short: tuple[tuple[int, str], ...] = ()
    parts: "tuple[Ask, ...]" = ()
    at_once: bool = False
    noise: tuple[float, int] = (0.0, 0)


class Computed(NamedTuple):
    """The result of a step on one device, without the update.

    Attributes:
        y_pred: leaves of the predictions; empty if unknown.
        loss: data loss and regularisation, without the scales; None if unknown.
        raw: gradients before clipping; empty if they overflow and the step is to be skipped.
        after: all variables after the step; only statistics and seeds have changed.
        of_parts: the same for each part of an `Ask` with parts.
    """

    y_pred: list[np.ndarray]
    loss: tuple[float, float] | None
    raw: Named
    after: Named
    of_parts: tuple[Named, ...] = ()


class Oracle(Protocol):
    """Computes what is right for a trace, from its own states and examples.

    A class that implements it inherits from it: methods with a result here are optional.

    Attributes:
        unit: largest step between numbers near 1 in the layers' dtypes.
        units: the same for each variable.
        draws_outside: whether other code than that of layers without `synchronized_layers` draws.
        layer_names: names of the layers that contain no other layers, or draw random numbers.
        random_layers: indices of those that draw random numbers.
        layers_with_statistics: indices of those with moving statistics.
        may_mix: whether a prediction may depend on other examples, which is worth a check.
        synchronized_layers: indices of those that use the statistics of all shards.
        scales_loss: whether the optimizer skips steps whose gradients overflow.
        records_overflow: whether a trace has the gradients of such steps.
        why_not_exact: why `compute` cannot compute in float64; "" if it can.
        tracks: names of the optimizer's own variables that an update changes.
        momentum: the momentum of SGD, and of RMSprop in PyTorch; 0 for another optimizer.
    """

    unit: float
    units: dict[str, float]
    layer_names: list[str]
    random_layers: tuple[int, ...]
    layers_with_statistics: tuple[int, ...]
    may_mix: bool
    synchronized_layers: tuple[int, ...]
    draws_outside: bool
    scales_loss: bool
    records_overflow: bool
    why_not_exact: str
    tracks: set[str]
    momentum: float

    def start(self) -> Named | None:
        """Returns the state before the first step; None if unknown."""
        return None

    def known_examples(self) -> set[int]:
        """Returns the hashes of all examples of the data set (`arithmetic.rows_of`), if known."""
        return set()

    def layers_of(self, seeds: Collection[str]) -> tuple[int, ...]:
        """Returns the indices of the layers that draw from these seeds."""
        return ()

    def bitwise(self, asks: Sequence[Ask], total: int) -> list[Computed] | None:
        """Computes shards exactly as a right training does, bit for bit; None if it cannot.

        Args:
            asks: the shards; their losses are sums divided by `total`.
            total: number of examples of the batch.
        """
        return None

    def compute(self, ask: Ask, *, exactly: bool = False) -> Computed:
        """Computes a shard in float32, or in float64."""

    def compute_finely(self, ask: Ask) -> Computed | None:
        """Computes a shard with float32 layers in place of bfloat16 and float16 layers.

        Returns None if layers do not support float32.
        """

    def loss(
        self, state: Named, data: Batch, y_pred: Batch, masks: Batch, *, weighted: bool = True
    ) -> float:
        """Returns the loss of given predictions, without regularisation."""

    def loss_gradients(self, state: Named, data: Batch, y_pred: Batch, masks: Batch) -> Batch:
        """Returns the gradient of that loss with respect to each prediction."""

    def regular_gradients(self, state: Named, data: Batch) -> Named:
        """Returns the gradients of the regularisation losses; empty without any."""
        return {}

    def backward_faults(self, ask: Ask) -> Iterator[tuple[str, str, Callable[[], Named]]]:
        """Yields cause, text and gradients of faults inside the backward pass of a split model."""
        yield from ()

    def targets(self, data: Batch) -> tuple[int, list[np.ndarray]]:
        """Returns how many leaves of the examples are inputs, and the sample weights."""

    def clip(self, gradients: Named) -> Named:
        """Returns gradients after the optimizer's clipping."""

    def limits(self) -> str:
        """Returns the thresholds of the optimizer's clipping in words; "" without clipping."""

    def settings(self) -> Iterator[OtherSetting]:
        """Yields other settings with which an optimizer may have made a wrong update."""
        yield from ()

    def update(
        self, before: Named, sums: Named, *, clips: bool = False, rate: float = 1.0,
        decays: bool = True, **settings: Any,
    ) -> Named:  # fmt: skip
        """Returns all variables after the optimizer's update with these gradients.

        Args:
            before: all variables before the update.
            sums: the gradients.
            clips: whether to clip first.
            rate: factor of the learning rate.
            decays: whether it also applies to weight decay.
            **settings: other settings of the optimizer.
        """
