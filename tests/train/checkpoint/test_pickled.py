"""Files of torch.save are read without importing or calling anything that they name."""

from __future__ import annotations

import contextlib
import io
import pickle
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.train.checkpoint import pickled
from stoker.train.checkpoint.pickled import Foreign, NotReadable, SavedTensor, TorchFile


def write_zip(path: Path, program: bytes, **storages: bytes) -> Path:
    """A file as torch.save lays it out."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/byteorder", b"little")
        for key, data in storages.items():
            archive.writestr(f"archive/data/{key}", data)
    return path


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def call_mkdir(target: str) -> bytes:
    return b"cposix\nmkdir\n" + text(target) + b"\x85R"


# Each of these programs creates the folder `target` when Python's own unpickler runs it.
ATTACKS: dict[str, Callable[[str], bytes]] = {
    "reduce": lambda target: b"\x80\x02" + call_mkdir(target) + b".",
    "reduce of a name on the stack": lambda t: (
        b"\x80\x04" + text("posix") + text("mkdir") + b"\x93" + text(t) + b"\x85R."
    ),
    "a dotted name": lambda t: b"\x80\x04" + text("os") + text("path.os.mkdir") + b"\x93" + text(t) + b"\x85R.",
    "instance by name": lambda t: b"(S" + repr(t).encode() + b"\niposix\nmkdir\n.",
    "instance from the stack": lambda t: b"(cposix\nmkdir\n" + text(t) + b"o.",
    "a new object": lambda t: b"\x80\x02csubprocess\nPopen\n(" + text("mkdir") + text(t) + b"l\x85R.",
    "inside a state": lambda t: b"\x80\x02cargparse\nNamespace\n)R}" + text("lr") + call_mkdir(t) + b"sb.",
    "a setstate of its own": lambda t: (
        b"\x80\x02cargparse\nNamespace\n)R}" + text("__setstate__") + b"cposix\nmkdir\nsb" + text(t) + b"b."
    ),
    "inside a table of tensors": lambda t: (
        b"\x80\x02}" + text("state_dict") + b"}" + text("fc.weight") + call_mkdir(t) + b"ss."
    ),
    "as a key": lambda t: b"\x80\x02}" + call_mkdir(t) + b"K\x01s.",
    "a nested pickle of torch's": lambda t: (
        b"\x80\x02ctorch.storage\n_load_from_bytes\n"
        + (lambda inner: b"B" + len(inner).to_bytes(4, "little") + inner)(legacy_attack(t))
        + b"\x85R."
    ),
    "called through functools": lambda t: b"\x80\x02cfunctools\npartial\ncposix\nmkdir\n" + text(t) + b"\x86R)R.",
    "in the place of torch's own arguments": lambda t: (
        b"\x80\x02ctorch._utils\n_rebuild_parameter\n" + call_mkdir(t) + b"\x89N\x87R."
    ),
}


def legacy_attack(target: str) -> bytes:
    """What `torch.save` wrote before zip files, with a payload; torch.load runs it with weights_only=False."""
    stream = io.BytesIO()
    torch.save({}, stream, _use_new_zipfile_serialization=False)
    return stream.getvalue().replace(b"}q\x00.", call_mkdir(target) + b".")


@pytest.mark.parametrize("name", ATTACKS)
def test_no_instruction_runs_what_a_file_names(tmp_path: Path, name: str) -> None:
    proof = tmp_path / "executed"
    program = ATTACKS[name](str(proof))
    with contextlib.suppress(NotReadable):
        TorchFile(write_zip(tmp_path / "w.pth", program))
    assert not proof.exists()
    with contextlib.suppress(Exception):  # some fail once the folder is there
        made = pickle.loads(program)
        if isinstance(made, subprocess.Popen):
            made.wait()
    assert proof.exists(), "the attack is harmless, so this test proves nothing"


def test_nothing_is_imported(tmp_path: Path) -> None:
    assert "antigravity" not in sys.modules
    program = b"\x80\x02cantigravity\nfly\n)R."
    made = TorchFile(write_zip(tmp_path / "w.pth", program)).content
    assert isinstance(made, Foreign)
    assert made.name == "antigravity.fly"
    assert "antigravity" not in sys.modules


def test_registered_extensions_and_unknown_instructions_are_refused(tmp_path: Path) -> None:
    for program in (b"\x80\x02\x82\x01.", b"\x80\x05\x97.", b"Pstorage\n.", b"\xff.", b"", b".", b"\x80\x02K\x01"):
        with pytest.raises(NotReadable):
            TorchFile(write_zip(tmp_path / "w.pth", program))


STORAGE = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x04tQ"


def tensor(*parts: bytes) -> bytes:
    """A tensor over four stored numbers, from the instructions for offset, shape and strides."""
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + b"".join(parts) + b"\x89)tR."


HUGE = b"\x8a\x06" + (2**40).to_bytes(6, "little")


@pytest.mark.parametrize(
    "parts",
    [
        (b"K\x00", HUGE + b"\x85", b"K\x01\x85"),
        (HUGE, b"K\x01\x85", b"K\x01\x85"),
        (b"K\x00", b"K\x02\x85", HUGE + b"\x85"),
        (b"J\xff\xff\xff\xff", b"K\x01\x85", b"K\x01\x85"),
        (b"K\x00", b"K\x04\x85", b"J\xff\xff\xff\xff\x85"),
        (b"K\x00", b"K\x02K\x02\x86", b"K\x01\x85"),
        (b"K\x00", text("4") + b"\x85", b"K\x01\x85"),
        (b"K\x00", b"(" + b"K\x01" * 70 + b"t", b"(" + b"K\x01" * 70 + b"t"),
    ],
)
def test_a_tensor_beyond_its_bytes_is_refused_without_allocating(tmp_path: Path, parts: tuple[bytes, ...]) -> None:
    whole = TorchFile(write_zip(tmp_path / "ok.pth", tensor(b"K\x00", b"K\x04\x85", b"K\x01\x85"), **{"0": bytes(16)}))
    assert torch.equal(whole.load(whole.content), torch.zeros(4))
    tracemalloc.start()
    with pytest.raises(NotReadable):
        file = TorchFile(write_zip(tmp_path / "w.pth", tensor(*parts), **{"0": bytes(16)}))
        file.load(file.content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000


def test_a_tensor_without_its_bytes_is_refused(tmp_path: Path) -> None:
    file = TorchFile(write_zip(tmp_path / "w.pth", tensor(b"K\x00", b"K\x04\x85", b"K\x01\x85")))
    with pytest.raises(NotReadable, match="missing"):
        file.load(file.content)


def test_programs_that_only_cost_time_or_memory_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A key whose hash would overflow the C stack, a memo at a huge index, lists twenty thousand deep.
    deep = b"\x80\x02}N" + b"\x85" * 120_000 + b"K\x01s."
    assert len(TorchFile(write_zip(tmp_path / "w.pth", deep)).content) == 1
    TorchFile(write_zip(tmp_path / "w.pth", b"\x80\x02Nr\xff\xff\xff\x7f."))
    TorchFile(write_zip(tmp_path / "w.pth", b"\x80\x02" + b"]" * 20_000 + b"a" * 19_999 + b"."))
    monkeypatch.setattr(pickled, "MOST_INSTRUCTIONS", 1000)
    with pytest.raises(NotReadable, match="1,000 instructions"):
        TorchFile(write_zip(tmp_path / "w.pth", b"\x80\x02" + b"N0" * 1000 + b"N."))
    monkeypatch.setattr(pickled, "LARGEST_PROGRAM", 1000)
    with pytest.raises(NotReadable, match="at most 1,000"):
        TorchFile(write_zip(tmp_path / "w.pth", b"\x80\x02" + b"N0" * 1000 + b"N."))


def test_parts_that_claim_the_same_bytes_are_refused(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "w.pth", b"\x80\x02N.", **{"0": bytes(100_000)})
    with zipfile.ZipFile(path, "a") as archive:
        entry = archive.getinfo("archive/data/0")
        for number in range(1, 50):  # the directory lists it fifty times; the bytes are there once
            again = zipfile.ZipInfo(f"archive/data/{number}")
            for field in ("header_offset", "file_size", "compress_size", "CRC", "compress_type", "create_system"):
                setattr(again, field, getattr(entry, field))
            archive.filelist.append(again)
        archive._didModify = True  # type: ignore[attr-defined]
    with pytest.raises(NotReadable, match="more than the file"):
        TorchFile(path)


def test_everything_that_torch_saves_comes_back(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    saved: dict[str, Any] = {
        "plain": whole, "transposed": whole.T, "a view": whole[1:, 2], "single": torch.tensor(3),
        "none": torch.zeros(0), "half": torch.ones(2, dtype=torch.bfloat16), "flags": torch.tensor([True, False]),
        "parameter": torch.nn.Parameter(torch.ones(2)), "wide": torch.ones(3, dtype=torch.uint16),
        "tiny": torch.ones(3).to(torch.float8_e4m3fn), "complex": torch.ones(2) * 1j,
        "channels": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }  # fmt: skip
    torch.save({"state_dict": saved, "epoch": 3, "names": ("a", {1: 2.5}), "flag": None}, tmp_path / "w.pth")
    file = TorchFile(tmp_path / "w.pth")
    assert (file.content["epoch"], file.content["names"]) == (3, ("a", {1: 2.5}))
    for name, value in file.content["state_dict"].items():
        assert isinstance(value, SavedTensor), name
        loaded = file.load(value)
        assert loaded.dtype == saved[name].dtype
        assert loaded.stride() == saved[name].stride()
        same = [one.view(torch.uint8) if name == "tiny" else one for one in (loaded, saved[name].detach())]
        assert torch.equal(*same), name
