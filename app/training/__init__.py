"""One training, from its specification to its last checkpoint."""
