"""Sets up devices, and starts the workers of a training on this machine."""
