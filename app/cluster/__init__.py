"""Training with several processes, on one or several machines."""
