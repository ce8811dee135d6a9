"""Six bugs of a DDP script, as replacements of text in `torch_ddp.py`."""

BUGS = {
    "no_set_epoch": {"        sampler.set_epoch(epoch)\n": ""},
    "bypassed_ddp": {"cross_entropy(model(x), y)": "cross_entropy(model.module(x), y)"},
    "unequal_shards": {  # The first process gets three quarters of each batch.
        "DistributedSampler(data, num_processes, rank)": "DistributedSampler(data, 1, 0)",
        "DataLoader(data, BATCH_SIZE // num_processes, ": "DataLoader(data, BATCH_SIZE, ",
        "            optimizer.zero_grad()\n": "            cut = len(x) * 3 // 4\n"
        "            x, y = (x[cut:], y[cut:]) if dist.get_rank() else (x[:cut], y[:cut])\n"
        "            optimizer.zero_grad()\n",
    },
    "clipped_on_one_rank": {
        "            nn.utils.clip_grad_norm_": "            if dist.get_rank() == 0:\n"
        "                nn.utils.clip_grad_norm_"
    },
    "local_batch_norm": {
        "SyncBatchNorm(8)": "nn.BatchNorm2d(8)",
        "SyncBatchNorm(16)": "nn.BatchNorm2d(16)",
    },
    "scaled_learning_rate": {"lr=0.1,": "lr=0.1 * num_processes,"},
}


def apply_bug(script: str, bug: str) -> str:
    """Returns the text of a script with a bug."""
    for old, new in BUGS[bug].items():
        if script.count(old) != 1:
            raise ValueError(
                f"{bug}: {old!r} must be in the script once, not {script.count(old)} times"
            )
        script = script.replace(old, new)
    return script
