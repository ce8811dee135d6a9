"""Functions that tests run in separate processes. Does not import TensorFlow."""

import os
import signal
import sys
import time

from app.runtime import console
from app.runtime.errors import DiskFullError


def refuse(send):
    raise DiskFullError("no space; make room")


def fail(send, text=""):
    raise ZeroDivisionError("oops")


def vanish(send):
    os._exit(137)


def prepare():
    sys.prepared = 0
    return {"text": "given"}


def refuse_to_prepare():
    refuse(None)


def is_prepared(send, text=""):
    sys.prepared += 1
    send(sys.prepared)
    return text


def hang(send):
    send(os.getpid())
    time.sleep(3600)


def hang_in_all_reduce(send, config):
    send(("has_tensorflow", True))
    send(("devices", ["/device:GPU:0", "/device:GPU:1"]))
    send(("stage", "manual"))
    send(("working", "manual"))
    send(("stage", "mirrored"))
    time.sleep(3600)


def vanish_in_examination(send, config):
    send(("stage", "TensorFlow"))
    os._exit(137)


def fail_in_examination(send, config):
    send(("stage", "devices"))
    raise ZeroDivisionError("oops")


def refuse_in_examination(send, config):
    refuse(send)


def leave(send):
    sys.exit(0)


def tell_search_path(send):
    return sys.path, os.getcwd(), os.environ.get("GIVEN")


def kill_itself(send, text=""):
    os.kill(os.getpid(), signal.SIGKILL)


def warn_and_echo(channel):
    console.forward_warnings(channel.send)
    console.warn("a warning")
    channel.kept.append(Stubborn())
    while message := channel.receive():
        channel.send(message)


class Stubborn:
    """An object whose destructor takes an hour."""

    def __del__(self):
        time.sleep(3600)
