"""Lists the default differences between port_torch.py and port_keras.py, and verify's findings."""

import dataclasses

UNBIASED = ("statistics", "unbiased_variance")  # In every pair, by design.
DECAY_IN_LOSS = ("gradients", "regularisation_in_the_loss")


@dataclasses.dataclass(frozen=True)
class PortCase:
    """A pair of recordings.

    Attributes:
        torch: options of port_torch.py.
        keras: options of port_keras.py.
        faults: stages and causes that verify finds in the second recording.
        by_design: likewise.
        replays: whether the second recording starts each step from the states of the first.
    """

    torch: tuple[str, ...] = ()
    keras: tuple[str, ...] = ()
    faults: tuple[tuple[str, str], ...] = ()
    by_design: tuple[tuple[str, str], ...] = (UNBIASED,)
    replays: bool = True


DECAY, WEIGHTS, SCHEDULE = "--weight_decay=0.01", "--class_weights", "--gamma=0.9"

RIGHT = {
    "right": PortCase(),
    "right_weight_decay": PortCase((DECAY,), (DECAY,), by_design=(DECAY_IN_LOSS, UNBIASED)),
    "right_class_weights": PortCase((WEIGHTS,), (WEIGHTS,)),
    "right_adam": PortCase(
        ("--adam",), ("--adam",), by_design=(("update", "epsilon_placement"), UNBIASED)
    ),
}
DIFFERENCES = {
    "initialisers": PortCase(
        keras=("--default=initialisers",),
        faults=(("start", "other_initialiser"),),
        by_design=(),
        replays=False,
    ),
    "batch_norm_epsilon": PortCase(
        keras=("--default=batch_norm_epsilon",),
        faults=(
            ("loss", "other_batch_norm_epsilon"),
            ("gradients", "other_batch_norm_epsilon"),
            ("statistics", "other_batch_norm_epsilon"),
        ),
    ),
    "batch_norm_momentum": PortCase(
        keras=("--default=batch_norm_momentum",),
        faults=(("statistics", "other_batch_norm_momentum"),),
    ),
    "biased_variance": PortCase(),
    "weight_decay": PortCase(
        (DECAY,),
        (DECAY, "--default=weight_decay"),
        (("update", "weight_decay_placement"),),
    ),
    "nesterov": PortCase(keras=("--default=nesterov",), faults=(("update", "other_nesterov"),)),
    "velocity": PortCase(
        (SCHEDULE,),
        (SCHEDULE,),
        by_design=(("update", "learning_rate_in_velocity"), UNBIASED),
    ),
    "drop_last": PortCase(
        keras=("--drop_remainder",), faults=(("examples", "last_batch_dropped"),)
    ),
    "padding": PortCase(
        keras=("--default=padding",),
        faults=(
            ("loss", "other_padding"),
            ("gradients", "other_padding"),
            ("statistics", "other_padding"),
        ),
        by_design=(),  # Every BatchNorm has a different batch.
    ),
    "class_weights": PortCase(
        (WEIGHTS,),
        ("--default=class_weights",),
        (("loss", "other_loss_reduction"), ("gradients", "other_loss_reduction")),
    ),
    "adam_epsilon": PortCase(
        ("--adam",),
        ("--adam", "--default=adam_epsilon"),
        (("update", "other_epsilon"),),
        (("update", "epsilon_placement"), UNBIASED),
    ),
    "flatten": PortCase(
        keras=("--default=flatten",),
        faults=(("loss", "flatten_order"), ("gradients", "flatten_order")),
    ),
}
