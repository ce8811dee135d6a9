"""The small experiments of `demo`: each one runs the program's own code and says what it shows."""
