"""Computes the differences in `verify.json` as fractions of their tolerances."""

import math

PANELS = {
    "loss": "loss of each replica",
    "gradients": "gradients before the all-reduce",
    "sums": "gradients after the all-reduce",
    "weights": "weights, given these sums",
    "own statistics": "BatchNorm statistics",
}
# Also drawn if they have a mismatch.
MISMATCH_PANELS = {
    "examples": "examples",
    "slots": "optimizer state",
    "agreement": "replicas against replica 0",
    "statistics": "BatchNorm statistics, averaged",
}
FLOOR = 1e-4  # Smaller fractions of the tolerance are drawn at the lower edge.
CEILING = 1e8


def distinct_trainings(strategies: dict) -> list[tuple[list[str], dict]]:
    """Returns names and measurements, once for bitwise identical trainings."""
    rows: list[tuple[list[str], dict]] = []
    for name, run in strategies.items():
        measured = run["measurements"]
        same = next((names for names, other in rows if other == measured), None)
        if same:
            same.append(name)
        elif measured:
            rows.append(([name], measured))
    return rows


def shares(measured: dict) -> dict[tuple, list[tuple[int, float]]]:
    """Returns kind, tensor and replica → step and error over tolerance.

    A value that is bitwise identical to the float32 reference is correct, whatever its distance to
    float64.
    """
    lines: dict[tuple, list[tuple[int, float]]] = {}
    columns = ("step", "kind", "tensor", "replica_id", "error", "limit", "absolute32")
    for step, kind, tensor, replica, error, limit, absolute32 in zip(
        *(measured.get(column, ()) for column in columns), strict=True
    ):
        share = error / limit if limit else (math.inf if error else 0.0)
        share = share if math.isfinite(share) else CEILING
        if absolute32 == 0:
            share = min(share, 1.0)
        if step or share > 1:
            point = (step, min(max(share, FLOOR), CEILING))
            lines.setdefault((kind, tensor, replica), []).append(point)
    return lines


def is_mismatch(points: list[tuple[int, float]]) -> bool:
    """Returns whether any value exceeds its tolerance."""
    return any(share > 1 for _, share in points)
