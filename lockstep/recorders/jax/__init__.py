"""Records what a JAX training computes; `lockstep.record_jax` has the public names."""

import jax

from lockstep.recorders.common import check_version

check_version("record_jax", "JAX", jax.__version__, (0, 8))
