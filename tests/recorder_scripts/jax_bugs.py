"""Three bugs of a shard_map script, as replacements of text in `jax_shard_map.py`."""

BUGS = {
    # With check_vma=False, JAX does not notice that the result differs between devices.
    "missing_psum": {'    grads = jax.lax.psum(grads, "data")\n': ""},
    # With the default check_vma=True, the gradient of replicated parameters is summed already.
    "summed_twice": {"    check_vma=False,\n": ""},
    # Each device divides by its own number of examples: wrong where a batch is filled up.
    "mean_of_means": {
        'jax.lax.psum(weights.sum(), "data")': '(weights.sum() * jax.lax.axis_size("data"))'
    },
}


def apply_bug(script: str, bug: str) -> str:
    """Returns the text of a script with a bug."""
    for old, new in BUGS[bug].items():
        if script.count(old) != 1:
            raise ValueError(f"{bug}: {script.count(old)} times in the script, not once: {old!r}")
        script = script.replace(old, new)
    return script
