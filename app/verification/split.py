"""Defines the parts into which a training splits a batch, and their names."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from strategies.base import Strategy

# Kinds of arrays that each shard has; copies of the weights share the others.
KINDS_OF_A_SHARD = {"examples", "loss", "gradients", "own statistics"}


class Split(NamedTuple):
    """The numbers of replicas, shards and copies of a strategy, which are independent.

    Attributes:
        num_replicas: R, parts of a batch that are trained in parallel.
        num_shards: S, parts with their own loss and gradient; each replica has S / R consecutive
            ones.
        num_copies: number of copies of the weights.
        syncs_batch_norm: whether BatchNorm is configured to normalise over all shards of a batch.
    """

    num_replicas: int
    num_shards: int
    num_copies: int
    syncs_batch_norm: bool = False

    @classmethod
    def of(cls, strategy: "Strategy") -> "Split":
        """Returns the numbers of a strategy."""
        return cls(
            strategy.num_replicas,
            strategy.num_shards,
            strategy.num_copies,
            strategy.syncs_batch_norm,
        )

    @property
    def shards_per_replica(self) -> int:
        """The number of micro-batches of each replica; 1 without micro-batches."""
        return self.num_shards // self.num_replicas

    @property
    def units(self) -> list[list[int]]:
        """The shards that one reference computation covers.

        One shard each, unless BatchNorm is synchronised: a shard's loss and gradient then depend on
        the examples of all shards, and their sums are compared.
        """
        shards = list(range(self.num_shards))
        return [shards] if self.syncs_batch_norm else [[shard] for shard in shards]

    def unit_of(self, shard_id: int) -> int:
        """Returns the index in `units` of a shard's unit."""
        return 0 if self.syncs_batch_norm else shard_id

    @property
    def shard_noun(self) -> str:
        """The name of a shard: "replica", or "micro-batch" if a replica has several."""
        return "replica" if self.shards_per_replica == 1 else "micro-batch"

    def name_shard(self, shard_id: int) -> str:
        """Returns "replica 1", "micro-batch 1" or "micro-batch 1 of replica 0"."""
        if self.shards_per_replica == 1:
            return f"replica {shard_id}"
        replica_id, index = divmod(shard_id, self.shards_per_replica)
        return f"micro-batch {index}" + (f" of replica {replica_id}" * (self.num_replicas > 1))

    def name_items(self, kind: str, item_ids: Sequence[int]) -> str:
        """Names the shards, or copies of the weights, that an array of a kind belongs to.

        Args:
            kind: a key of `trace.KINDS`.
            item_ids: ids of shards or copies.

        Returns:
            "every replica", "replica 0, 2", "micro-batch 1 of replica 0".
        """
        if kind not in KINDS_OF_A_SHARD:
            if len(item_ids) < self.num_copies:
                return "replica " + ", ".join(map(str, item_ids))
            return "every replica" if self.num_replicas > 1 else "the one replica"
        tied = self.syncs_batch_norm and kind in ("loss", "gradients")
        if len(item_ids) == self.num_shards or tied:
            return f"{'every' if self.num_shards > 1 else 'the one'} {self.shard_noun}"
        if self.shards_per_replica == 1:
            return "replica " + ", ".join(map(str, item_ids))
        return ", ".join(map(self.name_shard, item_ids))

    def describe(self) -> str:
        """Returns the parts of a batch in words: "2 replicas of 4 micro-batches"."""
        replicas = f"{self.num_replicas} replica{'s' * (self.num_replicas > 1)}"
        if self.shards_per_replica == 1:
            return replicas
        return f"{replicas} of {self.shards_per_replica} micro-batches"
