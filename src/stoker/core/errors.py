"""Errors that a user can act on.

    StokerError
    ├── UserError            something the user can fix             exit 1
    │   ├── UsageError       invalid command line                   exit 2
    │   └── ConfigError      invalid config file or override        exit 2
    ├── Interrupted          Ctrl-C; everything was shut down       exit 130
    └── Preempted            SIGTERM or SIGUSR1, checkpoint saved   exit 143

Any other exception is a bug: exit 3, with a log (stoker.cli).
"""

from __future__ import annotations

import errno
import re
import resource
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from stoker.core.finding import Finding, as_json
from stoker.core.units import size_text

EXIT_OK = 0
EXIT_FINDING = 1
EXIT_USAGE = 2
EXIT_BUG = 3
EXIT_INTERRUPTED = 130
EXIT_PREEMPTED = 143


class StokerError(Exception):
    """An expected error: what we saw, why it matters, what to type next."""

    exit_code = EXIT_FINDING

    def __init__(self, name: str, seen: str, *, why: str | None = None, hint: str | None = None) -> None:
        super().__init__(seen)
        self.name, self.seen, self.why, self.hint = name, seen, why, hint

    @property
    def finding(self) -> Finding:
        return Finding(self.seen, self.hint, name=self.name, why=self.why, status="failed")

    def __reduce__(self) -> Any:
        # Errors are pickled in worker processes; the default would call __init__ with one argument.
        return _rebuild, (type(self), self.args, self.__dict__)

    def as_dict(self) -> dict[str, Any]:
        """The error as `--json` prints it; missing parts are null."""
        return as_json(self.finding, "name", "message", "why", "hint") | {"exit_code": self.exit_code}


def _rebuild(kind: type[StokerError], arguments: tuple[Any, ...], parts: dict[str, Any]) -> StokerError:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(parts)
    return error


class UserError(StokerError):
    """Something the user can fix."""


class UsageError(UserError):
    """The command line is invalid."""

    exit_code = EXIT_USAGE


def config_problem(keys: Sequence[str], seen: str, where: str | None = None, fix: str | None = None) -> Finding:
    """One problem of a config: the keys that it is about, and the place in the file."""
    return Finding(seen, fix, status="failed", keys=tuple(keys), where=where)


class ConfigError(UserError):
    """All problems of a config at once."""

    exit_code = EXIT_USAGE

    def __init__(
        self,
        seen: str,
        problems: Sequence[Finding] = (),
        *,
        name: str = "config-invalid",
        why: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(name, seen, why=why, hint=hint)
        self.problems = tuple(problems)

    def as_dict(self) -> dict[str, Any]:
        return super().as_dict() | {
            "problems": [as_json(problem, "keys", "message", "where", "hint") for problem in self.problems]
        }


class Interrupted(StokerError):
    """The user pressed Ctrl-C; everything was shut down cleanly."""

    exit_code = EXIT_INTERRUPTED


class Preempted(StokerError):
    """The machine is being reclaimed; a checkpoint was saved."""

    exit_code = EXIT_PREEMPTED


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was most likely meant, or None if none is close."""
    return next(iter(_nearest_words(word, known)), None)


def did_you_mean(word: str, known: Iterable[str], *, most_edits: int | None = None) -> str | None:
    """The same as a question, with every equally close word (`atch_size`: batch or patch?)."""
    words = _nearest_words(word, known, most_edits)
    return f"did you mean {' or '.join(words)}?" if words else None


def _nearest_words(word: str, known: Iterable[str], most_edits: int | None = None) -> list[str]:
    # Fewest edits win: difflib's ratio prefers long common runs and guesses wrong among keys that share
    # a prefix. A third of the letters may be wrong; and at least one (two from four letters on).
    allowed = max(1 if len(word) < 4 else 2, len(word) // 3)
    allowed = allowed if most_edits is None else min(allowed, most_edits)
    # Each letter that only one word has costs an edit: this rules out most words cheaply.
    letters = Counter(word.lower())
    near = [
        name
        for name in known
        if abs(len(name) - len(word)) <= allowed and (letters - Counter(name.lower())).total() <= allowed
    ]
    edits = {name: _edits(word.lower(), name.lower()) for name in near}
    fewest = min(edits.values(), default=allowed + 1)
    return sorted(name for name in near if edits[name] == fewest <= allowed)


def _edits(a: str, b: str) -> int:
    """Number of insertions, deletions, substitutions and transpositions that turn `a` into `b`."""
    two_back: list[int] = []
    previous = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        row = [i]
        for j, other in enumerate(b, 1):
            cost = min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                cost = min(cost, two_back[j - 2] + 1)
            row.append(cost)
        two_back, previous = previous, row
    return previous[-1]


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
