"""The experiments of `demo`, which run the program's own code and explain the results."""
