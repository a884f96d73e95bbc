"""Stores return exactly the bytes that are there, or name what is wrong."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from stoker.core.errors import UserError
from stoker.io.aws_settings import profile_settings
from stoker.io.cache import CachedStore, cache_place
from stoker.io.object_store import ObjectStore
from stoker.io.stores import LocalStore, ReadFailure, Store, StoreDown, open_store
from tests.support.s3_server import BUCKET, KEY, SECRET, S3Server, use_environment
from tests.support.waiting import DEADLINE_S

CONTENT = bytes(range(256)) * 40


def reason_of(store: Store, *arguments: object, **more: object) -> str:
    with pytest.raises(ReadFailure) as caught:
        store.read(*arguments, **more)  # type: ignore[arg-type]
    assert caught.value.path == arguments[0]
    return caught.value.reason


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "a.jpg").write_bytes(CONTENT)
    return tmp_path


def put(server: S3Server, prefix: str) -> str:
    server.put(f"{prefix}/class/a.jpg", CONTENT)
    return f"s3://{BUCKET}/{prefix}"


@pytest.fixture(params=["folder", "file URL", "object store", "object store behind a cache"])
def store(request: pytest.FixtureRequest, folder: Path) -> Store:
    if request.param == "folder":
        return open_store(str(folder))
    if request.param == "file URL":
        return open_store(f"file://{folder}")
    url = put(request.getfixturevalue("s3"), "same")
    place = cache_place(str(folder / "cache") if "cache" in request.param else None)
    return open_store(url) if place is None else CachedStore(open_store(url), place)


def test_whole_and_partial_reads_are_exact(store: Store) -> None:
    for _ in range(2):
        assert bytes(store.read("class/a.jpg")) == CONTENT
        assert bytes(store.read("class/a.jpg", 0, len(CONTENT), whole=True)) == CONTENT
        assert bytes(store.read("class/a.jpg", 100, 1000)) == CONTENT[100:1100]
        assert bytes(store.read("class/a.jpg", 5, 0)) == b""
        assert bytes(store.read("class/a.jpg", len(CONTENT) - 7, 7)) == CONTENT[-7:]


def test_every_problem_with_an_object_has_a_name(store: Store) -> None:
    assert reason_of(store, "class/none.jpg") == "missing"
    assert reason_of(store, "class/a.jpg", 0, len(CONTENT) - 1, whole=True) == "changed"
    assert reason_of(store, "class/a.jpg", 100, len(CONTENT)) == "short"
    assert reason_of(store, "class/a.jpg", len(CONTENT) + 1, 10) == "short"
    assert reason_of(store, "../etc/passwd") == "bad name"
    assert reason_of(store, "class/a.jpg", 0, 10**12) == "too large"


def test_an_object_above_the_limit_is_not_read(folder: Path, s3: S3Server) -> None:
    for root in (str(folder), put(s3, "large")):
        assert reason_of(open_store(root, max_object_bytes=1000), "class/a.jpg") == "too large"


def test_files_that_only_look_like_images_are_named_and_odd_names_are_read(folder: Path) -> None:
    (folder / "folder.jpg").mkdir()
    os.mkfifo(folder / "pipe.jpg")
    (folder / "broken.jpg").symlink_to(folder / "nowhere")
    (folder / "loop.jpg").symlink_to(folder / "loop.jpg")
    (folder / "empty.jpg").write_bytes(b"")
    store = LocalStore(folder)
    assert reason_of(store, "folder.jpg") == "is a directory"
    assert reason_of(store, "pipe.jpg") == "not a file"
    assert reason_of(store, "broken.jpg") == "missing"
    assert reason_of(store, "loop.jpg") == "unreadable"
    assert reason_of(store, "class/a.jpg/b.jpg") == "missing"
    assert reason_of(store, "zero\0byte") == "bad name"
    assert store.read("empty.jpg") == b""
    name = b"\xff\xfe.jpg"
    Path(os.fsdecode(bytes(folder) + b"/" + name)).write_bytes(b"x")
    assert store.read(name.decode("utf-8", "surrogateescape")) == b"x"
    with pytest.raises(StoreDown, match="can no longer be read"):
        LocalStore(folder / "unmounted").read("a.jpg")


def test_the_number_of_open_shards_is_bounded(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.tar").write_bytes(bytes([number]) * 100)
    store = LocalStore(tmp_path)
    store._most_open = 8
    before = len(list(Path("/proc/self/fd").iterdir()))
    wrong: list[int] = []

    def read_all() -> None:
        for _ in range(20):
            wrong.extend(n for n in range(40) if store.read(f"{n}.tar", 10, 50) != bytes([n]) * 50)

    threads = [threading.Thread(target=read_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 8


def test_stores_cross_to_other_processes_without_secrets(s3: S3Server, tmp_path: Path) -> None:
    store = CachedStore(open_store(put(s3, "pickled")), cache_place(str(tmp_path / "cache")))
    assert bytes(store.read("class/a.jpg")) == CONTENT
    text = pickle.dumps(store)
    assert SECRET.encode() not in text
    assert KEY.encode() not in text
    assert bytes(pickle.loads(text).read("class/a.jpg")) == CONTENT


def test_a_fork_after_a_request_is_refused_and_one_before_works(s3: S3Server) -> None:
    url = put(s3, "forked")
    program = f"""
import os
from stoker.io.object_store import ObjectStore
from stoker.core.errors import UserError
store = ObjectStore({url!r})
def in_child():
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if len(store.read("class/a.jpg")) == {len(CONTENT)} else 1)
        except UserError as error:
            os._exit(2 if error.name == "object-store-after-fork" else 3)
        finally:
            os._exit(4)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
first = in_child()
store.read("class/a.jpg")
print(first, in_child(), len(store.read("class/a.jpg")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout.split() == ["0", "2", str(len(CONTENT))], done.stderr


def test_keys_of_a_profile_are_used_where_the_environment_has_none(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = put(s3, "keys-of-a-profile")
    (tmp_path / "credentials").write_text(
        f"[default]\naws_access_key_id = wrong\naws_secret_access_key = wrong\n"
        f"[work]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
    )
    (tmp_path / "config").write_text(f"[profile work]\nregion = us-east-1\nendpoint_url = {s3.endpoint}\n")
    files = {"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"), "AWS_CONFIG_FILE": str(tmp_path / "config")}
    use_environment(monkeypatch, files | {"AWS_PROFILE": "work"})
    assert bytes(ObjectStore(url).read("class/a.jpg")) == CONTENT
    use_environment(monkeypatch, files | {"AWS_ENDPOINT_URL": s3.endpoint})
    with pytest.raises(StoreDown) as caught:
        ObjectStore(url).read("class/a.jpg")
    assert caught.value.name == "credentials-refused"


def test_a_profile_whose_keys_only_aws_can_issue_is_refused_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text("[profile sso]\nsso_session = corp\nregion = eu-west-1\n")
    with pytest.raises(UserError, match="sso_session") as caught:
        profile_settings({"HOME": str(tmp_path), "AWS_PROFILE": "sso"})
    assert "export-credentials --profile sso" in (caught.value.hint or "")
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    assert profile_settings({"HOME": str(tmp_path), "AWS_PROFILE": "sso"} | keys) == {"region": "eu-west-1"}
    assert profile_settings({"HOME": str(tmp_path)}) == {}


def test_boto3_gets_the_keys_of_a_profile_that_has_none_of_its_own(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("boto3", reason="optional: for profiles with SSO, roles or credential_process")
    url = put(s3, "process")
    keys = json.dumps({"Version": 1, "AccessKeyId": KEY, "SecretAccessKey": SECRET})
    (tmp_path / "keys").write_text(keys)
    (tmp_path / "config").write_text(
        f"[profile made]\nregion = us-east-1\nendpoint_url = {s3.endpoint}\ncredential_process = cat {tmp_path}/keys\n"
    )
    use_environment(monkeypatch, {"AWS_CONFIG_FILE": str(tmp_path / "config"), "AWS_PROFILE": "made"})
    assert bytes(ObjectStore(url).read("class/a.jpg")) == CONTENT
    (tmp_path / "keys").write_text("not JSON")
    with pytest.raises(UserError) as caught:
        ObjectStore(url).read("class/a.jpg")
    assert caught.value.name == "no-credentials"


@pytest.mark.parametrize("url", ["ftp://host/data", "s3://", "s3://key:secret@bucket/data"])
def test_urls_that_make_no_sense_are_refused(url: str) -> None:
    with pytest.raises(UserError) as caught:
        open_store(url)
    assert "secret@" not in str(caught.value)
