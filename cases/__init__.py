"""A data set of silent bugs in distributed training: right programs, and their wrong twins."""
