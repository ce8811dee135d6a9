"""Into which parts a training splits a batch, and what they are called."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from strategies.base import Strategy

# Kinds of arrays that each shard has of its own; copies of the weights have the others in common.
KINDS_OF_A_SHARD = {"examples", "loss", "gradients", "own statistics"}


class Split(NamedTuple):
    """The numbers of a strategy: none of them follows from another.

    Attributes:
        num_replicas: R, parts of a batch that are trained on side by side.
        num_shards: S, parts with a loss and a gradient of their own; each replica has S / R in a
            row.
        num_copies: of the weights.
        syncs_batch_norm: whether BatchNorm is to normalise all shards of a batch together.
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
        """The micro-batches of each replica; 1 where its shard is in one piece."""
        return self.num_shards // self.num_replicas

    @property
    def units(self) -> list[list[int]]:
        """The shards that one reference computation covers.

        Each shard is one, unless BatchNorm ties them together: then a shard's loss and gradient
        depend on the examples of all of them, and their sums are compared.
        """
        shards = list(range(self.num_shards))
        return [shards] if self.syncs_batch_norm else [[shard] for shard in shards]

    def unit_of(self, shard_id: int) -> int:
        """Returns which of `units` a shard belongs to."""
        return 0 if self.syncs_batch_norm else shard_id

    @property
    def shard_noun(self) -> str:
        """What a shard is called: "replica", or "micro-batch" where a replica has several."""
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
            item_ids: of shards or copies.

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
        """Returns how many of what a batch is split into: "2 replicas of 4 micro-batches"."""
        replicas = f"{self.num_replicas} replica{'s' * (self.num_replicas > 1)}"
        if self.shards_per_replica == 1:
            return replicas
        return f"{replicas} of {self.shards_per_replica} micro-batches"
