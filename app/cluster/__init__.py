"""Several processes that train together, on one machine or on many."""
