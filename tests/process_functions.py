"""What tests run in processes of their own: nothing here imports TensorFlow."""

import os

from app.errors import DiskFullError


def add(send, a, b):
    send(("step", 1))
    send(("step", 2))
    return a + b


def refuse(send):
    raise DiskFullError("no space — some is required; make room")


def fail(send):
    raise ZeroDivisionError("oops")


def vanish(send):
    os._exit(137)
