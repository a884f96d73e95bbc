"""Gives tests the same signals, variables, home, umask, locale and time zone, however they are started."""

from __future__ import annotations

import atexit
import locale
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress

KEPT = {
    "PATH", "TMPDIR", "USER", "LOGNAME", "SHELL",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "CC", "CXX", "CPATH", "C_INCLUDE_PATH", "LIBRARY_PATH",  # torch.compile
    "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES",  # on a shared host: the GPUs that are ours to use
}  # fmt: skip
"""Variables that say where things are on this host. All others are removed as settings of the user: credentials, ranks,
proxies, numbers of threads."""
KEPT_PREFIXES = ("PYTEST_", "COVERAGE_", "COV_CORE_", "NIX_")
IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}


def isolate() -> None:
    """Makes this process and its children independent of how it was started.

    Call it before importing torch, which reads its variables on import.
    """
    _handle_ignored_signals()
    for name in list(os.environ):
        if name not in KEPT and not name.startswith(KEPT_PREFIXES):
            del os.environ[name]
    # Otherwise every process would compile stoker, and pytest every test, anew: seconds each.
    sys.dont_write_bytecode = False
    home = tempfile.mkdtemp(prefix="stoker-home-")
    atexit.register(_remove, home, os.getpid())
    # Our commands let OpenMP's threads sleep while they wait, too; tests that run them here have imported torch before.
    os.environ |= {"HOME": home, "LANG": "C.UTF-8", "TZ": "UTC", "OMP_WAIT_POLICY": "PASSIVE"}
    time.tzset()
    with suppress(locale.Error):  # an old glibc has no C.UTF-8; Python then uses UTF-8 itself
        locale.setlocale(locale.LC_ALL, "")
    os.umask(0o022)


def _handle_ignored_signals() -> None:
    """Restores the default for ignored signals. They are inherited, for example from `nohup` or a script's `&`, and
    Ctrl-C would then stop neither this process nor its children."""
    for number in signal.valid_signals() - IGNORED_BY_PYTHON:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, _HANDLERS.get(number, signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _survive(_number: int, _frame: object) -> None:
    """Lets `nohup make test` survive its terminal; processes that the tests start get the default, as for a user."""


_HANDLERS = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: _survive}


def _remove(home: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a fork that exits
        shutil.rmtree(home, ignore_errors=True)
