"""Options of a run: output, resuming and fault injection."""

import dataclasses

from app.config.fault import FAULTS, Fault
from app.config.names import CLUSTER, COMPUTATION, OUTPUT, VERIFICATION, VERIFY_EVERY
from app.config.option import option


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerbosityOptions:
    """Sets the verbosity of TensorFlow."""

    verbosity: int = option(
        -1,
        "0 shows TensorFlow's warnings, 1 all of its messages.",
        OUTPUT,
        metavar="-1|0|1",
        low=-1,
        high=1,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Selects the output directory."""

    out: str | None = option(
        None,
        "Output directory; default runs/<time>-<strategy>-<model>.",
        OUTPUT,
        metavar="DIR",
    )
    overwrite: bool = option(
        False, "Start from scratch in an output directory that holds another run.", OUTPUT
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavingOptions:
    """Sets when a training saves, and when it gives up."""

    checkpoint_every: int | None = option(
        None,
        "Save a checkpoint every STEPS steps; default: every five minutes. One is always "
        "saved at the end of an epoch.",
        OUTPUT,
        metavar="STEPS",
        low=1,
        high=1_000_000_000,
    )
    stall_timeout_sec: int = option(
        1800,
        "Stop with exit code 138 after SEC seconds without progress; 0 waits forever.",
        OUTPUT,
        metavar="SEC",
        low=0,
        high=1_000_000,
    )
    steps_per_call: int | None = option(
        None,
        "Training steps in one call of the compiled function. Default: as many as take "
        "half a second.",
        COMPUTATION,
        metavar="N",
        low=1,
        high=1_000_000,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepVerificationOptions:
    """Selects the steps of a training to verify, and the reaction to a mismatch."""

    verify_every: int | None = option(
        None,
        "Verify every N-th step while the training runs, and also the first step and the last one"
        " of the first epoch: compare the step with the same step on one device. 0 turns it off."
        f" Default: the first step, the last step of each epoch and every {VERIFY_EVERY}th of a"
        " long epoch, where steps can be verified.",
        VERIFICATION,
        metavar="N",
        low=0,
        high=1_000_000_000,
    )
    on_mismatch: str = option(
        "stop",
        "When a verified step does not match: stop with exit code 9, or warn.",
        VERIFICATION,
        choices=("stop", "warn"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """Controls how a training starts."""

    start_timeout_sec: int = option(
        300,
        "Seconds to wait for missing workers.",
        CLUSTER,
        metavar="SEC",
        low=1,
        high=1_000_000,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class InjectOptions:
    """Selects the fault to inject."""

    inject: str | None = option(
        None,
        "Inject a fault: "
        + " ".join(str(Fault.parse(name)) for name in FAULTS)
        + ". verify injects it into the first strategy that can have it, or into that of"
        " strategy=NAME.",
        VERIFICATION,
        metavar="FAULT",
    )

    @property
    def fault(self) -> Fault | None:
        """The fault of `--inject`."""
        return Fault.parse(self.inject) if self.inject else None

    def inject_field(self) -> dict[str, str | None]:
        """Returns the fault in its canonical form, for `result_fields`."""
        return {"inject": self.fault.spec if self.fault else None}
