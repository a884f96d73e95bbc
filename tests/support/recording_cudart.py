"""A stand-in for torch's binding of the CUDA runtime: records page-locked memory, and checks it against the kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

NOT_SUPPORTED = 801


class Mapping(NamedTuple):
    """A line of /proc/self/maps."""

    start: int
    end: int
    inode: int


def mappings() -> list[Mapping]:
    """Everything that is mapped now."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, _, _, _, inode, *_ = line.split(maxsplit=5)
        start, end = place.split("-")
        found.append(Mapping(int(start, 16), int(end, 16), int(inode)))
    return found


def mapping_of(address: int, size: int, mapped: list[Mapping]) -> Mapping | None:
    """The mapping that holds the whole range; None if part of it is not mapped."""
    return next((one for one in mapped if one.start <= address and address + size <= one.end), None)


@dataclass
class RecordingCudart:
    """Registers memory as CUDA would; `fails_from` is the number of the first call that fails."""

    fails_from: int | None = None
    registered: dict[int, tuple[int, Mapping]] = field(default_factory=dict)
    calls: int = 0
    unregistered: int = 0
    last_error: int = 0
    """As in CUDA, it stays until somebody asks for it."""
    faults: list[str] = field(default_factory=list)
    """What real CUDA would answer with an error, or with memory that stays locked for good."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        self.check()
        number, self.calls = self.calls, self.calls + 1
        mapping = mapping_of(address, size, mappings())
        if flags != 0:
            self.faults.append(f"flags {flags}")
        if mapping is None:
            self.faults.append(f"{address:x} was registered and is not mapped")
            return self._fail()
        if any(address < other + length and other < address + size for other, (length, _) in self.registered.items()):
            self.faults.append(f"{address:x} was registered twice")
        if self.fails_from is not None and number >= self.fails_from:
            return self._fail()
        self.registered[address] = (size, mapping)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        self.check()
        if address not in self.registered:
            self.faults.append(f"{address:x} was unregistered and not registered")
            return self._fail()
        del self.registered[address]
        self.unregistered += 1
        return 0

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802 - CUDA's name
        return f"error {code}"

    def cudaGetLastError(self) -> int:  # noqa: N802 - CUDA's name
        error, self.last_error = self.last_error, 0
        return error

    def check(self) -> None:
        """Notes what is registered and no longer mapped, or mapped anew; and an error that nobody cleared."""
        mapped = mappings() if self.registered else []
        for address, (size, mapping) in self.registered.items():
            now = mapping_of(address, size, mapped)
            if now is None or now.inode != mapping.inode:
                self.faults.append(f"{address:x} was unmapped while registered")
        if self.last_error:
            self.faults.append("an error was not cleared")

    def _fail(self) -> int:
        self.last_error = NOT_SUPPORTED
        return NOT_SUPPORTED
