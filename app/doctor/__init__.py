"""What a machine has, checked by name before anything is trained on it."""
