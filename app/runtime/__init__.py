"""The basis of all other packages: errors, console, processes, signals."""
