"""`verify`: checks that trainings are the same training, or names the first mismatch."""

from app.options import Config
from app.verification.output import Run


def run(config: Config) -> dict[str, Run]:
    """Verifies strategies or a case, and reports the verdicts.

    Returns:
        Name of each training → result.

    Raises:
        MismatchError: a training has a fault.
    """
    if config.verification.case is not None:
        from app.verification.cases import verify_case

        return verify_case(config)
    from app.verification.strategies import verify_strategies

    return verify_strategies(config)
