"""`stoker.watch()`: the same timers as `stoker doctor --`, attached by one line of the script itself."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from stoker.attach import session
from stoker.attach.session import start
from stoker.core.errors import UserError
from stoker.doctor.script.process_watch import ProcessWatch
from stoker.doctor.script.reading import ABOUT_FILES, Recording, read_attached, read_recording
from stoker.doctor.script.run_script import ON_PATH
from stoker.profile.host import HostWatch
from stoker.profile.observed import Observed

DEFAULT_FOLDER = "stoker_watch"
OUR_FILES = (ABOUT_FILES, "steps-*.ring", "fetch-*.ring")
# Ranks of one run start within seconds of each other and share the folder; older files are from a previous run.
SAME_RUN_S = 60.0
HOST_LOOK_S = 1.0


class Watch:
    """A recording that continues until the process ends; `stoker doctor FOLDER` reads it, also while it grows."""

    def __init__(self, folder: Path, opened: session.Session) -> None:
        self.folder = folder
        self._session = opened
        self._host = HostWatch()
        self._processes = ProcessWatch(folder)
        self._stopping = threading.Event()
        self._pid = os.getpid()
        # A spawned worker imports the script again and gets here too: one watch over the host is enough.
        if multiprocessing.parent_process() is None:
            # Once a second, a millisecond or less: /dev/shm and memory have only momentary values.
            threading.Thread(target=self._look, name="stoker-watch", daemon=True).start()
            atexit.register(self._keep_host)

    def observed(self) -> Observed:
        """What has been observed so far."""
        return read_attached(self.folder)

    def recording(self) -> Recording:
        """The same with its notes; no error if nothing has been recorded yet."""
        return read_recording(self.folder)

    def stop(self) -> None:
        """Stops recording; the script continues."""
        self._session.recording = False
        self._keep_host()

    def _look(self) -> None:
        while not self._stopping.wait(HOST_LOOK_S):
            self._host.look()
            self._processes.look()

    def _keep_host(self) -> None:
        if os.getpid() == self._pid and not self._stopping.is_set():
            self._stopping.set()
            with suppress(OSError, ValueError):
                self._session.say(host=asdict(self._host.facts()), processes=self._processes.as_records())


_watches: list[Watch] = []


def watch(report: str | Path = DEFAULT_FOLDER) -> Watch:
    """Records where this script's time goes, from here on, in the folder `report`; read it with `stoker doctor FOLDER`.

    Call it before the first DataLoader is iterated. It prints nothing. Calling it again, as a spawned worker does when
    it imports the script, has no effect."""
    if _watches:
        return _watches[0]
    inherited = os.environ.get(session.FOLDER_VARIABLE)
    folder = Path(inherited if inherited and Path(inherited).is_dir() else report).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            "report-folder-unusable",
            f"{folder} cannot be created: {error.strerror}",
            hint="stoker.watch(report='FOLDER')",
        ) from None
    if not inherited:
        _remove_older(folder)
        # Spawned workers are attached to as under `stoker doctor --`: through PYTHONPATH.
        os.environ[session.FOLDER_VARIABLE] = str(folder)
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ON_PATH), before]))
    made = Watch(folder, start(str(folder)))
    _watches.append(made)
    return made


def _remove_older(folder: Path) -> None:
    for pattern in OUR_FILES:
        for path in folder.glob(pattern):
            with suppress(OSError):
                if path.stat().st_mtime < time.time() - SAME_RUN_S:
                    path.unlink()
