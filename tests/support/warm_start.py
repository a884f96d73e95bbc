"""New Python processes of ours without the seconds of their imports: forks of a process that has imported everything.

    start_warm()       # in a test process: from now on, `subprocess` and `multiprocessing` start our programs warm
    with cold(): ...   # real new interpreters, where imports or the start itself are tested

With the variable COLD_START, a warm process starts its own children cold. A program of a test (`python -c TEXT` or
`python FILE`) is started warm if its text begins with the comment `# warm`.

A warm process has the parent, environment, folder, descriptors, session, limits and exit code that it would have had as
a new interpreter. The process that is forked never runs anything itself. Whoever asks for a process becomes its
parent: the fork is made by a process in between that ends at once, and orphans go to the nearest subreaper.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import inspect
import json
import os
import pkgutil
import re
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import util
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[2]
MEASURED = {
    "stoker.profile.accelerators.SECONDS_EACH": 0.01, "stoker.tasks.images.decode.calibration.BUDGET_S": 0.05,
    "stoker.stage.copying.MEASURE_S": 0.3, "stoker.verify.nodes.WORK_S": 0.05,
}  # fmt: skip
"""How long this machine is measured, in seconds: what comes out matters to no test."""
OURS = re.compile(
    r"-m (stoker|pytest|torch\.distributed\.run|tests\.[\w.]+) "
    r"|-c import sys;exec\(eval\(sys\.stdin\.readline\(\)\)\) "  # a test process of pytest-xdist
    r"|-c (from (stoker\.core\.child|multiprocessing\.(forkserver|spawn)) |\n?# warm\n)"
    rf"|{re.escape(str(PROJECT))}/(train|benchmark_data_loading|bench/document_replica|tools/run_tests)\.py "
    rf"|{re.escape(str(PROJECT))}/tests/support/foreign_scripts/\w+\.py "
)
"""Programs that are started warm, by their arguments after Python's own flags."""
FLAGS = {"-P", "-B", "-u", "-E", "-s"}
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SUBREAPER, _PARENT_DEATH = 36, 1  # options of prctl
_COLLAPSE, _HUGE = 25, 2**21  # advice of madvise, and the bytes of a huge page
_LIBC = ctypes.CDLL(None, use_errno=True)
_ROOM = 60_000
"""Characters of a command line, and of an environment, that a warm process can show in /proc."""

_server: socket.socket | None = None
_owner: int | None = None
"""The process whose children the server makes; a fork of it starts its programs cold."""
_asking = threading.Lock()
_cold = False
_execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_spawnv = util.spawnv_passfds  # type: ignore[attr-defined]


def start_warm() -> None:
    """From now on, this process starts our programs warm. Its server is started when one is asked for.

    A Python whose `subprocess` looks different inside starts them cold."""
    if len(inspect.signature(_execute_child).parameters) != 24:
        return
    subprocess.Popen._execute_child = _execute_warm  # type: ignore[attr-defined]
    util.spawnv_passfds = _spawn_warm  # type: ignore[attr-defined]


@contextmanager
def cold() -> Iterator[None]:
    """Inside the block, every program is a new interpreter."""
    global _cold
    before, _cold = _cold, True
    try:
        yield
    finally:
        _cold = before


# In the process that asks.


def _is_ours(args: Any) -> bool:
    if _cold or _owner not in (None, os.getpid()):
        return False
    if not isinstance(args, list | tuple) or not args or os.fsdecode(args[0]) != sys.executable:
        return False
    words = [os.fsdecode(word) for word in args[1:]]
    while words and words[0] in FLAGS:
        words = words[1:]
    return OURS.match(" ".join(words) + " ") is not None or (words[:1] != [] and _says_warm(words[0]))


def _says_warm(path: str) -> bool:
    try:
        with Path(path).open("rb") as file:
            return file.readline().strip() == b"# warm"
    except OSError:
        return False


def _execute_warm(self: Any, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
    (_close_fds, pass_fds, cwd, env, _info, _flags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
     _restore, gid, _gids, uid, _umask, new_session, group) = rest  # fmt: skip
    before_exec = None if preexec_fn is None else getattr(preexec_fn, "__qualname__", "?")
    is_launch = before_exec == "_prepare.<locals>.ask_the_kernel"
    if not _is_ours(args) or shell or executable or gid or uid or not (preexec_fn is None or is_launch):
        _execute_child(self, args, executable, preexec_fn, *rest)
        return
    try:
        standard = [theirs if theirs != -1 else number for number, theirs in enumerate((p2cread, c2pwrite, errwrite))]
        self.pid = _ask(args, [*standard, *pass_fds], [0, 1, 2, *pass_fds], cwd, env, new_session, group, is_launch)
        self._child_created = True
    finally:
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def _spawn_warm(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
    if not _is_ours(list(args)):
        return int(_spawnv(path, args, passfds))
    numbers = sorted(set(passfds) | {0, 1, 2})
    return _ask(args, numbers, numbers, None, None, False, -1, False)


def _ask(
    args: Sequence[Any], ours: list[int], theirs: list[int], cwd: Any, env: Any, session: bool, group: int, launch: bool
) -> int:
    wish = {
        "args": [os.fsdecode(word) for word in args[1:]], "descriptors": theirs,
        "cwd": os.fsdecode(cwd) if cwd is not None else str(Path.cwd()),
        "env": {os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if env is None else env).items()},
        "session": bool(session), "group": group if group >= 0 else os.getpgrp(), "launch": launch,
        "parent": os.getpid(),
        "limits": [resource.getrlimit(number) for number in LIMITS], "cores": sorted(os.sched_getaffinity(0)),
        "cgroups": Path("/proc/self/cgroup").read_text(), "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "ignored": [int(number) for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN],
    }  # fmt: skip
    with _asking:
        server = _running_server()
        _LIBC.prctl(_SUBREAPER, 1)
        try:
            text = json.dumps(wish).encode("utf-8", "surrogateescape")
            socket.send_fds(server, [len(text).to_bytes(4, "big")], ours)
            server.sendall(text)
            answer = server.recv(4)
            if len(answer) < 4:
                raise RuntimeError("the process that others are forked from has ended")
        finally:
            _LIBC.prctl(_SUBREAPER, 0)
    return int.from_bytes(answer, "big")


def _running_server() -> socket.socket:
    """In a new interpreter: this process may have threads, and memory that its forks would share."""
    global _server, _owner
    if _server is None:
        _owner = os.getpid()
        _server, theirs = socket.socketpair()
        path = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
        program = (
            f"from tests.support.warm_start import serve_imported; serve_imported({theirs.fileno()}, {os.getpid()})"
        )
        with theirs:
            # Not kept: it ends with us.
            server = subprocess.Popen(
                [sys.executable, "-c", program, " " * _ROOM], pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": path, "ROOM": " " * _ROOM},
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
            server.returncode = 0  # type: ignore[assignment]
    return _server


# In the process that is forked.


def serve_imported(descriptor: int, parent: int) -> None:
    """The life of the first process that others are forked from."""
    # All of them: a task is imported by name when it is used, and with it torchvision and timm, a second of every run.
    package = import_module("stoker")
    for module in pkgutil.walk_packages(package.__path__, "stoker."):
        if not module.name.endswith(("__main__", "sitecustomize")):
            import_module(module.name)
    import_module("matplotlib.pyplot")  # looks for the fonts of this machine, in every new home
    import_module("stoker.run.environment").installed_packages()  # remembered: a tenth of a second of every run
    for place, seconds in MEASURED.items():
        module_name, _, name = place.rpartition(".")
        assert hasattr(import_module(module_name), name), place
        setattr(import_module(module_name), name, seconds)
    gc.collect()
    gc.freeze()  # a collection would write to all memory that forks share
    _use_huge_pages()
    _serve(socket.socket(fileno=descriptor), parent)


def _use_huge_pages() -> None:
    """Puts our memory into huge pages where the kernel can (Linux 6.1). A fork and its end handle every page: with
    0.5 GB that takes 33 ms of CPU in small pages and 9 ms in huge ones, and every program takes three forks."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        words = line.split()
        if words[1] == "rw-p" and words[5:] in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in words[0].split("-"))
            begin, end = -(-begin // _HUGE) * _HUGE, end // _HUGE * _HUGE
            if begin < end:  # one that cannot is left as it is
                _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _COLLAPSE)


def _serve(channel: socket.socket, parent: int) -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _LIBC.prctl(_PARENT_DEATH, signal.SIGKILL)
    while os.getppid() == parent:
        head, descriptors, _, _ = socket.recv_fds(channel, 4, 250)
        if not head:
            break
        wish = json.loads(_exactly(channel, int.from_bytes(head, "big")).decode("utf-8", "surrogateescape"))
        # Closed by the new process when it has become what was asked for, as after an exec; its number comes before.
        told, tell = os.pipe()
        go, gone = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child:
                os._exit(0)
            # Not before the process in between has ended, and we have the right parent.
            os.close(gone)
            os.read(go, 1)
            for number in (told, go):
                os.close(number)
            channel.close()
            _live(wish, descriptors, tell)
        os.waitpid(between, 0)
        for number in (tell, go, gone, *descriptors):
            os.close(number)
        with os.fdopen(told, "rb") as reading:
            channel.sendall(reading.read())


def _exactly(channel: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += channel.recv(count - len(data))
    return data


# In the new process.


def _live(wish: dict[str, Any], descriptors: list[int], ready: int) -> None:
    """Runs the program that was asked for, as a new interpreter would; never returns."""
    code = 1
    os.write(ready, os.getpid().to_bytes(4, "big"))
    try:
        out_of_the_way = fcntl.fcntl(ready, fcntl.F_DUPFD, 400)
        os.close(ready)
        _become(wish, descriptors, out_of_the_way)
        code = _run(wish["args"])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _print_error() -> None:
    """Prints the traceback. A signal handler that raises meanwhile, as torch's does when a worker was killed, ends the
    printing but not the exit, as in the interpreter."""
    with suppress(Exception):
        traceback.print_exc()


def _become(wish: dict[str, Any], descriptors: list[int], ready: int) -> None:
    """Takes on what a process inherits from its parent."""
    global _server, _owner
    if wish["session"]:
        os.setsid()
    else:
        os.setpgid(0, wish["group"])
    for number in SIGNALS:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if int(number) in wish["ignored"] else default)
    for line in wish["cgroups"].splitlines():
        _join_cgroup(line)
    os.sched_setaffinity(0, wish["cores"])
    os.setpriority(os.PRIO_PROCESS, 0, wish["nice"])
    os.chdir(wish["cwd"])
    os.environ.clear()
    os.environ.update(wish["env"])
    _show_in_proc(["python", *wish["args"]], wish["env"])
    _place_descriptors(descriptors, wish["descriptors"])
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, buffering=1, closefd=False, errors=None if number < 2 else "backslashreplace")  # noqa: SIM115
        for number, mode in ((0, "r"), (1, "w"), (2, "w"))
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.close(ready)
    if wish["launch"]:
        from stoker.train.launch import _prepare

        _prepare(wish["parent"])()
    # Before anything else is done here: this process gets one of its own to fork from.
    ours, theirs = socket.socketpair()
    me = os.getpid()
    if os.fork() == 0:
        ours.close()
        _close_all_but(theirs.fileno())
        _show_in_proc(["warm start"], {})
        _serve(theirs, me)
        os._exit(0)
    theirs.close()
    _server, _owner = ours, me
    for number, limit in zip(LIMITS, wish["limits"], strict=True):
        with suppress(ValueError, OSError):
            resource.setrlimit(number, tuple(limit))
    if "COLD_START" not in os.environ:
        start_warm()


def _show_in_proc(command: list[str], environment: dict[str, str]) -> None:
    """Makes `ps` and /proc show this command line and environment, where a new interpreter would have them."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments = [f"{word}\0" for word in command]
    variables = [f"{name}={value}\0" for name, value in environment.items()]
    for words, begin, end in ((arguments, *fields[45:47]), (variables, *fields[47:49])):
        room = int(end) - int(begin)
        text = "".join(words).encode("utf-8", "surrogateescape")[: room - 1]
        ctypes.memmove(int(begin), text.ljust(room, b"\0"), room)


def _close_all_but(kept: int) -> None:
    """Closes all descriptors but one: nobody may wait for the end of a pipe because of us."""
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if number not in (kept, 0, 1, 2):
            with suppress(OSError):  # that of the listing itself
                os.close(number)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)


def _join_cgroup(line: str) -> None:
    _, controllers, path = line.split(":", 2)
    if line in Path("/proc/self/cgroup").read_text().splitlines():
        return
    root = Path("/sys/fs/cgroup") / controllers.removeprefix("name=")
    with suppress(OSError):
        (root / path.lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))


def _place_descriptors(have: list[int], wanted: list[int]) -> None:
    # Out of the way first: one may have a number that another one has to get.
    high = [fcntl.fcntl(number, fcntl.F_DUPFD, 400) for number in have]
    for number in have:
        os.close(number)
    for number, target in zip(high, wanted, strict=True):
        os.dup2(number, target, inheritable=True)
        os.close(number)


def _run(args: list[str]) -> int:
    """The exit code of `python ARGS`."""
    safe_path = False
    while args[0] in FLAGS:
        safe_path = safe_path or args[0] == "-P"
        args = args[1:]
    from_variable = os.environ.get("PYTHONPATH")
    sys.path[:0] = from_variable.split(os.pathsep) if from_variable else []
    with suppress(ImportError):  # the doctor's; Python imports it at its start
        import_module("sitecustomize")
    run: Callable[[], Any]
    if args[0] == "-c":
        sys.argv = ["-c", *args[2:]]
        sys.path[:0] = [] if safe_path else [""]
        run = lambda: exec(compile(args[1], "<string>", "exec"), {"__name__": "__main__"})  # noqa: E731
    elif args[0] == "-m":
        sys.argv = [args[1], *args[2:]]
        sys.path[:0] = [] if safe_path else [str(Path.cwd())]
        run = lambda: runpy.run_module(args[1], run_name="__main__", alter_sys=True)  # noqa: E731
    else:
        sys.argv = args
        sys.path[:0] = [str(Path(args[0]).parent)]
        run = lambda: runpy.run_path(args[0], run_name="__main__")  # noqa: E731
    code, interrupted = 0, False
    try:
        run()
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        _print_error()
        interrupted = True
    except BaseException:
        _print_error()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code & 0xFF
