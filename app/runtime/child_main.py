"""The program of a process that `processes.ChildProcess` starts.

It does not import the user's main module. The parent sends its `sys.path`, so that both processes
find the same modules.
"""

import os
import signal
import sys
from multiprocessing.connection import Connection


def main() -> None:
    """Receives the search path, then the function with its arguments, and calls it."""
    descriptor, parent_pid, death_signal = map(int, sys.argv[1:])
    connection = Connection(descriptor)
    try:
        sys.path[:] = connection.recv()
    except EOFError:
        return  # The parent has ended.
    from app.runtime import function_call
    from app.runtime.run_context import RunContext

    context = RunContext()  # A local variable, so that its objects exist until `_exit`.
    function_call.run(connection, parent_pid, signal.Signals(death_signal), context)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)  # Deleting TensorFlow's objects can take 30 s.


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent gets the signal, too, and acts on it.
    main()
