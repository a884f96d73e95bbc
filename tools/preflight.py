"""Checks whether an environment can be installed here, before anything is downloaded.

Runs under any `python3`, however old: no syntax newer than Python 3.0.
"""

import argparse
import os
import shutil
import sys

OLDEST_PYTHON = (3, 11)
# torch with its CUDA libraries takes 5.5 GB; pip needs more while it unpacks the wheels.
ENVIRONMENT_GB = 5.5
DOWNLOAD_GB = 2.5


def problems(venv):
    """Every reason why an environment cannot be installed at `venv`."""
    if sys.version_info < OLDEST_PYTHON:
        seen = ".".join(str(part) for part in sys.version_info[:3])
        yield "Python %s is too old: stoker needs 3.11 or newer. Try: make setup PYTHON=python3.11" % seen
        return  # the modules below may not exist in such a Python
    try:
        import ensurepip  # noqa: F401
        import venv as _  # noqa: F401
    except ImportError:
        yield "this Python cannot create virtual environments. Try: apt-get install python3-venv"
    if os.path.exists(os.path.join(venv, ".installed")):
        return  # updating an environment replaces files and needs no second 5.5 GB
    parent = os.path.dirname(os.path.abspath(venv))
    free_gb = shutil.disk_usage(parent).free / 1e9
    if free_gb < ENVIRONMENT_GB + DOWNLOAD_GB:
        yield (
            "%.1f GB free at %s: torch needs %.1f GB, and %.1f GB more while it is unpacked. "
            "Try: make setup VENV=/a/larger/disk"
        ) % (free_gb, parent, ENVIRONMENT_GB, DOWNLOAD_GB)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", required=True, help="where to create the environment")
    found = list(problems(parser.parse_args().venv))
    for problem in found:
        sys.stderr.write("error: %s\n" % problem)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
