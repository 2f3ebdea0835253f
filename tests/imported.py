"""A process that has imported what tests need, and copies itself on request: `python -m tests.imported
SOCKET`. It computes nothing, because copies have none of its threads. It ends with its standard input."""

import contextlib
import gc
import logging
import os
import pickle
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import NoReturn

MODULES = (
    "maxsimd.api.cli", "maxsimd.api.serve", "maxsimd.bench.datasets", "maxsimd.engine.checkpoint.library",
    "maxsimd.engine.engine", "maxsimd.api.fleet.process", "gguf", "hypothesis", "httpx", "jsonschema",
    "playwright.sync_api", "pytest", "scipy.stats", "sentence_transformers", "tests.checkpoints.adapters",
    "tests.checkpoints.two_towers", "tests.checkpoints.vision_language", "tests.clients_under_load",
    "transformers.models.bert.modeling_bert",
)  # fmt: skip


def _import_all() -> None:
    from maxsimd.api.process import let_waiting_threads_sleep

    # As a command does before it imports torch.
    let_waiting_threads_sleep()
    for name in MODULES:
        import_module(name)
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    # Hundreds of patterns, which transformers compiles for the first model that it loads.
    get_checkpoint_conversion_mapping("bert")
    gc.collect()
    gc.freeze()


def _received(connection: socket.socket) -> tuple[bytes, list[int]]:
    """A pickled call, and the files that are to be 0, 1 and 2."""
    size, files, _, _ = socket.recv_fds(connection, 8, 3)
    data = b""
    while len(data) < int.from_bytes(size, "little"):
        data += connection.recv(1 << 20)
    return data, files


def _serve(path: str) -> Callable[[], NoReturn] | None:
    """Makes copies until the input ends. Returns what a copy is to do, in the copy, and None in the end."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    copies: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        for file in (0, woken, listener):
            selector.register(file, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if 0 in ready and not os.read(0, 1):
                return None
            if woken in ready:
                os.read(woken, 1 << 16)
                _tell_ended(copies)
            if listener in ready:
                connection, _ = listener.accept()
                data, files = _received(connection)
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for each in (listener, connection, *copies.values()):
                        each.close()
                    os.close(woken)
                    os.close(wake)
                    return lambda: _run(data, files)
                for number in files:
                    os.close(number)
                connection.sendall(pid.to_bytes(8, "little"))
                copies[pid] = connection


def _tell_ended(copies: dict[int, socket.socket]) -> None:
    while copies:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with copies.pop(pid) as connection:
            code = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(OSError):  # nobody asks any more
                connection.sendall(code.to_bytes(8, "little", signed=True))


def _run(data: bytes, files: list[int]) -> NoReturn:
    """Does what was asked for, and ends as a program does that was started for it."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    # Made anew, because those of a regular file ask where in it they are, which a terminal does not know.
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    status: object = 0
    try:
        folder, environment, target, arguments = pickle.loads(data)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        target(*arguments)
    except SystemExit as left:
        status = left.code
    except BaseException:
        traceback.print_exc()
        status = 1
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    logging.shutdown()  # as a program does that ends
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


if __name__ == "__main__":
    _import_all()
    if (work := _serve(sys.argv[1])) is not None:
        work()
    os._exit(0)  # not by way of what libraries have to say in the end
