"""The kernel's list of mounts says what storage a folder is on, even with mounts on top of mounts."""

from __future__ import annotations

from pathlib import Path

from stoker.profile.mounts import Mount, is_remote, mount_of

LIST = r"""27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 27 0:30 / /data rw,relatime shared:5 - nfs4 filer:/export rw,vers=4.2
31 30 0:31 / /data/bucket rw - fuse.gcsfuse bucket rw
32 27 0:32 / /mnt/my\040disk rw - xfs /dev/nvme0n1 rw
33 27 0:33 / /s3 rw - fuse mountpoint-s3 rw
34 27 0:34 / /over rw - ext4 /dev/vdb rw
35 34 0:35 / /over rw - tmpfs tmpfs rw
"""


def test_the_innermost_and_newest_mount_counts_and_what_a_type_does_not_say_is_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text(LIST)
    mounts = {
        "/home/me/images": Mount("ext4", False), "/data/imagenet": Mount("nfs4", True),
        "/database": Mount("ext4", False), "/data/bucket/train": Mount("fuse.gcsfuse", True),
        "/mnt/my disk/train": Mount("xfs", False), "/s3/imagenet": Mount("fuse", True),
        "/over/x": Mount("tmpfs", False),
    }  # fmt: skip
    assert {path: mount_of(path, tmp_path / "mountinfo") for path in mounts} == mounts
    assert is_remote("fuse", "something") is None
    assert mount_of("/", tmp_path / "missing") is None


def test_a_link_counts_as_its_target(tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text(f"1 1 0:1 / / rw - ext4 a rw\n2 1 0:2 / {tmp_path}/there rw - lustre b rw\n")
    (tmp_path / "there").mkdir()
    (tmp_path / "here").symlink_to(tmp_path / "there")
    assert mount_of(tmp_path / "here" / "train", tmp_path / "mountinfo") == Mount("lustre", True)
