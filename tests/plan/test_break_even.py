"""Whether a copy pays off, and the exact command for it, on a disk that has room."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stoker.plan.break_even import break_even, break_even_text, staging_fix
from stoker.profile.mounts import LocalDisk, find_local_disk


def test_a_copy_pays_off_by_what_the_source_the_disk_and_the_consumer_reach() -> None:
    # 100 GB at 20 MB/s take 5,000 s; with 100 MB/s each epoch then saves 4,000 s.
    found = break_even(1e11, 20e6, local=1e9, needed=100e6)
    assert found is not None
    assert (found.copy_s, found.epochs) == (5000, 1.25)
    assert break_even_text(found) == "copying 100 GB first takes 83 min and pays off after 1.2 epochs"
    slow_disk = break_even(1e11, 20e6, local=40e6, needed=100e6)
    assert slow_disk is not None
    assert slow_disk.epochs == 2.0
    endless = break_even(1e9, 1e8)
    assert endless is not None
    assert endless.epochs == 1.0  # nothing known but the source: the copy costs one epoch's reading
    enough = break_even(1e11, 200e6, local=1e9, needed=100e6)
    assert enough is not None
    assert enough.epochs is None
    assert "saves nothing" in break_even_text(enough)
    assert enough.as_dict()["epochs"] is None
    assert break_even(1e11, 0.0) is None


@pytest.mark.parametrize(
    ("source", "is_config", "root", "room", "fix"),
    [
        ("rsb_a3.yaml", True, "s3://b/imagenet/", None, "stoker stage rsb_a3.yaml --to /local/disk/imagenet"),
        ("a.yaml data_root=/x", True, None, LocalDisk("/nvme", None), "stoker stage a.yaml data_root=/x --to /nvme/a"),
        ("a.yaml", True, "/d/my set", LocalDisk("/nvme/", 10**12), "stoker stage a.yaml --to '/nvme/my set'"),
        ("/mnt/my set", False, "/mnt/my set", LocalDisk("/n", 10**12),
         "stoker stage '/mnt/my set' '/n/my set', then let the script read '/n/my set'"),
        ("a.yaml", True, "/d/x", LocalDisk("/nvme", 50 * 10**9),
         "cache_dir=/nvme/stoker-cache cache_size=45GB: keeps 45% of the data nearby"),
        ("a.yaml", True, "/d/x", LocalDisk("/nvme", 10**9),
         "a local disk with room for 100 GB, or a smaller, packed copy"),
        ("/d/x", False, "/d/x", LocalDisk("/nvme", 50 * 10**9),
         "a local disk with room for 100 GB, or a smaller, packed copy"),
    ],
)  # fmt: skip
def test_the_command_copies_what_fits_and_keeps_a_part_of_what_does_not(
    source: str, is_config: bool, root: str | None, room: LocalDisk | None, fix: str
) -> None:
    found = staging_fix(source, is_config=is_config, root=root, size_bytes=1e11, disk=room)
    assert found.fix == fix
    if room is not None and room.free_bytes is not None:
        assert f"{room.folder} has" in found.about
        assert ("do not fit" in found.about) == (found.share < 1)


def test_the_disk_with_the_most_room_is_found_and_network_mounts_are_not_disks(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    listed = (
        "27 1 254:0 / /nowhere rw,relatime - ext4 /dev/vda rw\n"
        f"30 27 0:30 / {tmp_path} rw - nfs4 filer:/export rw\n"
        f"31 27 0:31 / {tmp_path} ro - xfs /dev/sdb ro\n"
        f"32 27 0:32 / {tmp_path}/disk rw - xfs /dev/nvme0n1 rw\n"
    )
    (tmp_path / "mountinfo").write_text(listed)
    found = find_local_disk(tmp_path / "mountinfo")
    assert found is not None
    assert found.folder == str(tmp_path / "disk")
    assert found.free_bytes
    assert find_local_disk(tmp_path / "missing") is None
    here = find_local_disk()
    assert here is None or os.access(here.folder, os.W_OK)
