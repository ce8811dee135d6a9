"""What every part of the program stands on: errors, console, processes, signals."""
