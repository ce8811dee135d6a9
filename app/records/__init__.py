"""The files that runs write, and their readers."""
