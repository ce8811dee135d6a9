"""What a process runs that `processes.ChildProcess` starts, as a program of its own.

A user's main module plays no part in it. The modules that the function needs are found where the
process that waits finds them: it sends its `sys.path` first.
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
        return  # The process that waits has ended.
    from app.runtime import function_call
    from app.runtime.run_context import RunContext

    context = RunContext()  # Named here, so that all that it keeps lasts until `_exit`.
    function_call.run(connection, parent_pid, signal.Signals(death_signal), context)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)  # Taking TensorFlow's objects apart was seen to wait for half a minute.


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The process that waits gets it, too.
    main()
