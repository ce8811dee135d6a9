"""Rules of optimizers: the updates that they make, computed in float64."""
