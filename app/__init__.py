"""The application: everything but the architectures and the strategies."""

import sys

# Before anything is imported that an old Python cannot read.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.stderr.write(
        "error: Python {}.{} — 3.11 or newer is required; use another interpreter\n".format(
            *sys.version_info
        )
    )
    sys.exit(2)
