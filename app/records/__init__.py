"""All that is written to disk, and what is drawn from it."""
