"""A stand-in for ``python`` on nodes that starts in a tenth of a second: a process that has loaded everything forks.

    python warm_python.py SOCKET serve          load, and answer until standard input is closed
    python warm_python.py SOCKET ARGUMENTS...   have a fork run ``python ARGUMENTS...``: its output, its exit status

A hundred jobs of one tiny run each cost seconds of this machine then, instead of minutes of importing torch.
"""

import array
import json
import os
import runpy
import signal
import socket
import sys


def serve(path):
    import numpy  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import submitit.core.submission  # noqa: F401
    import torch

    import experiments.records
    import experiments.training
    import slurm.aftermath
    import slurm.job  # noqa: F401

    torch.set_num_threads(1)
    for name in ("code_identity", "environment_facts"):  # git and others are asked once
        answer_ = getattr(experiments.records, name)()
        setattr(experiments.records, name, lambda found=answer_: found)
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen(64)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if os.fork():
        sys.stdin.read()  # until the test ends
        os.killpg(0, 9)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    while True:
        connection, _ = server.accept()
        if os.fork() == 0:
            answer(connection)
        connection.close()


def answer(connection):
    """The intermediate process waits for the one that runs, and tells its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    data, ancillary, *_ = connection.recvmsg(1 << 20, socket.CMSG_SPACE(12))
    files = array.array("i", ancillary[0][2])
    while not data.endswith(b"\n"):
        data += connection.recv(1 << 20)
    request = json.loads(data)
    child = os.fork()
    if child == 0:
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        run(request["arguments"])
    _, status = os.waitpid(child, 0)
    connection.sendall(bytes([os.waitstatus_to_exitcode(status) & 255]))
    os._exit(0)


def run(arguments):
    code = 0
    try:
        arguments = [argument for argument in arguments if argument != "-u"]
        assert arguments[0] == "-m"
        sys.argv = arguments[1:]
        sys.modules.pop(arguments[1], None)
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def ask(path, arguments):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
        files = array.array("i", [0, 1, 2]).tobytes()
        connection.sendmsg([json.dumps(request).encode() + b"\n"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
        code = connection.recv(1)
    sys.exit(code[0] if code else 1)


if __name__ == "__main__":
    serve(sys.argv[1]) if sys.argv[2:] == ["serve"] else ask(sys.argv[1], sys.argv[2:])
