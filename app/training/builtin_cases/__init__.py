"""The built-in models as cases; `--case=lenet` is the file `case_lenet.py`."""
