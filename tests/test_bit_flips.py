"""A few of the flips of `make bit-flips`."""

import pytest

import bit_flips
from models import MODELS


def test_flipped_bits_are_noticed_and_named(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "lenet", "dense_network:build_conv_norm_network")
    counts = bit_flips.run(8 * (len(bit_flips.IN_MEMORY) + len(bit_flips.FILES)), 7, tmp_path)
    for kind in (*bit_flips.IN_MEMORY, *bit_flips.FILES):
        assert counts[kind, "noticed, named"] >= 6, counts


def test_what_is_not_noticed_fails_the_campaign(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "lenet", "dense_network:build_conv_norm_network")
    monkeypatch.setattr(bit_flips.Memory, "_compare_replicas", lambda memory: "")
    monkeypatch.setattr(bit_flips.Memory, "_train_step", lambda memory: "")
    with pytest.raises(AssertionError, match="weights: Outcome"):
        bit_flips.run(1, 7, tmp_path)
