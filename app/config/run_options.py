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
        "0 shows TensorFlow's own messages, 1 all of them.",
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
        False, "Start from scratch in a directory that holds another run.", OUTPUT
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavingOptions:
    """Sets when a training saves, and when it gives up."""

    checkpoint_every: int | None = option(
        None,
        "Save every so many steps; default every five minutes. Always after an epoch.",
        OUTPUT,
        metavar="STEPS",
        low=1,
        high=1_000_000_000,
    )
    stall_timeout_sec: int = option(
        1800,
        "End a training that makes no progress for so long, with exit code 138; 0 waits.",
        OUTPUT,
        metavar="SEC",
        low=0,
        high=1_000_000,
    )
    steps_per_call: int | None = option(
        None,
        "Steps in a compiled call; default: those of half a second.",
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
        "Record every N-th step while the training runs, besides the first one and the last of the"
        " first epoch, and check it against one device; 0 verifies none. Default: the last step of"
        f" each epoch, every {VERIFY_EVERY}th of a long one, where steps can be verified.",
        VERIFICATION,
        metavar="N",
        low=0,
        high=1_000_000_000,
    )
    on_mismatch: str = option(
        "stop",
        "What a step that is wrong does: stop the training with exit code 9, or warn.",
        VERIFICATION,
        choices=("stop", "warn"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """Controls what a training accepts when it resumes or starts."""

    force_resume: bool = option(
        False,
        "Resume a run although learning rate, batch size, seed, recipe or data have changed.",
        OUTPUT,
    )
    start_timeout_sec: int = option(
        300,
        "How long workers wait for missing workers.",
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
