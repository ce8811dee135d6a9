"""The basis of all other packages: errors, console, processes, signals.

Importing it chooses TensorFlow's kernels, which is possible only before TensorFlow is imported.
"""

from app.runtime.kernels import choose_kernels

choose_kernels()
