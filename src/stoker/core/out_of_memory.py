"""Running out of memory, or of addresses, as an error that a user can act on, however a library words it."""

from __future__ import annotations

import errno
import re
import resource

from stoker.core.errors import UserError
from stoker.core.units import size_text

LEAST_ADDRESS_BYTES = 3_500_000 * 1024
"""With `ulimit -v 3000000` PyTorch 2.15 aborts the process while it starts, with 4000000 a small network trains."""
_WORDS = re.compile(
    r"can't allocate memory|cannot allocate memory|failed to map segment|unable to mmap|std::bad_alloc"
    r"|can't start new thread|Unable to allocate [\d.]+ [KMGT]iB",
    re.IGNORECASE,
)


def refuse_few_addresses() -> None:
    """Raises UserError if `ulimit -v` allows fewer addresses than PyTorch maps: it would abort in the middle."""
    limit = _address_limit()
    if limit is not None and limit < LEAST_ADDRESS_BYTES:
        raise UserError(
            "address-space-limited",
            f"`ulimit -v` allows this process {size_text(limit)} of addresses; PyTorch needs "
            f"{size_text(LEAST_ADDRESS_BYTES)} to start",
            why="libraries are mapped whole, whatever is used of them; memory that is really used is far less",
            hint="ulimit -v unlimited    # to limit memory itself: systemd-run --user --scope -p MemoryMax=8G stoker …",
        )


def as_out_of_memory(error: BaseException) -> UserError | None:
    """The error for the user, if this one says that the host's memory ran out; None if it says anything else."""
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    libraries = isinstance(error, (RuntimeError, ImportError, OSError)) and _WORDS.search(first) is not None
    if not (isinstance(error, MemoryError) or system or libraries):
        return None
    limit = _address_limit()
    limited = "" if limit is None else f"; `ulimit -v` allows it {size_text(limit)} of addresses"
    return UserError(
        "out-of-memory",
        f"this process got no more memory: {first or type(error).__name__}",
        why=f"the machine, or a limit of its own, has no more for it{limited}",
        hint="lower num_workers, prefetch_factor or batch_size; `stoker plan CONFIG` shows what a run needs",
    )


def _address_limit() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft
