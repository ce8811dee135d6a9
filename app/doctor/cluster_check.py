"""Checks the cluster that the environment defines, if any."""

import os
from collections.abc import Mapping

from app.cluster.environment import SLURM_VARIABLES, find_cluster
from app.doctor.check import NOTE, Check
from app.runtime import console
from app.runtime.errors import ConfigError

_SHOWN_ADDRESSES = 4


def check_cluster(environ: Mapping[str, str] = os.environ) -> Check:
    """Reads TF_CONFIG, or SLURM's variables, as `multi_worker` does."""
    in_step = all(environ.get(name) for name in SLURM_VARIABLES)
    if not environ.get("TF_CONFIG") and not in_step:
        job = environ.get("SLURM_JOB_ID")
        told = f"SLURM's job {job}, but not within srun" if job else "neither TF_CONFIG nor SLURM"
        return Check("cluster", f"{told}: one machine", NOTE)
    try:
        cluster = find_cluster(environ)
    except ConfigError as error:
        return Check.of_error("cluster", error)
    shown = ", ".join(cluster.addresses[:_SHOWN_ADDRESSES])
    more = len(cluster.addresses) - _SHOWN_ADDRESSES
    shown += f" and {more} more" if more > 0 else ""
    return Check(
        "cluster",
        f"{cluster.source}: {console.count(len(cluster.addresses), 'worker')} ({shown}), this is"
        f" worker {cluster.index}; --strategy=multi_worker joins it",
    )
