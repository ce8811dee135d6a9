"""The networks of this program as cases; `--case=lenet` is the file `case_lenet.py`."""
