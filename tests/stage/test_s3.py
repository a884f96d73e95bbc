"""Staging from a real S3 server, through a proxy that breaks responses."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import obstore
import pytest

from stoker.cli import main
from stoker.core.errors import StokerError
from stoker.io import outage
from stoker.io.connection import Patience
from stoker.io.local_copy import LocalCopy
from stoker.stage.copying import copy_all, find_work, verify_copy
from stoker.stage.sources import open_source
from stoker.stage.transfer import StageOptions, Summary
from stoker.tasks.base import Selection
from tests.support.proxy import Proxy
from tests.support.s3_server import BUCKET, S3Server
from tests.support.staging import files_of
from tests.support.waiting import wait_until

HASTE = Patience(connect_s=2, stall_s=0.5, request_s=10, retry_s=20, max_retries=30)


def content(number: int) -> bytes:
    sizes = [0, 1, 1000, 20_000, 110_000, 300_000]
    return np.random.default_rng(number).bytes(sizes[number % len(sizes)])


def upload(server: S3Server, prefix: str, files: int) -> dict[str, bytes]:
    """Objects of many sizes, one of them large enough to be fetched in parts."""
    objects = {f"train/c{number % 4}/i {number:03}+ü.jpg": content(number) for number in range(files)}
    objects["shards/large.tar"] = np.random.default_rng(99).bytes(20_000_000)
    objects["medium.bin"] = np.random.default_rng(98).bytes(3_000_000)
    for name, data in objects.items():
        # In one piece, so that the ETag is a checksum, also of the large one.
        obstore.put(server.client(), f"{prefix}/{name}", data, use_multipart=False)
    return objects


def stage(url: str, target: Path, options: StageOptions = StageOptions(), patience: Patience = HASTE) -> Summary:  # noqa: B008
    source = open_source(url, patience)
    copy = LocalCopy(target, source.url)
    work = find_work(source, copy, Selection())
    try:
        return copy_all(source, copy, Selection(), work, options, lambda _summary, _total: None)
    finally:
        copy.close()


@pytest.fixture(scope="module")
def objects(s3_server: S3Server) -> dict[str, bytes]:
    return upload(s3_server, "stage", 40)


def test_a_bucket_is_copied_verified_and_copied_again_only_where_it_changed(
    s3: S3Server, objects: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, target = f"s3://{BUCKET}/stage", tmp_path / "copy"
    assert main(["stage", url, str(target), "--verify", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["complete"]
    assert told["copied"]["files"] == len(objects)
    assert told["failed"] == 0
    assert (told["copied"]["verified_against_store"], told["copied"]["length_only"]) == (len(objects), 0)
    assert told["verification"]["whole"]
    assert told["verification"]["files"] == len(objects)
    assert files_of(target) == objects
    s3.put("stage/train/c1/i 001+ü.jpg", b"new content")
    (target / "train/c2/i 002+ü.jpg").unlink()
    assert main(["stage", url, str(target), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["copied"]["files"], again["already_present"]) == (2, len(objects) - 2)
    s3.put("stage/train/c1/i 001+ü.jpg", objects["train/c1/i 001+ü.jpg"])
    flipped = target / "train/c3/i 003+ü.jpg"
    flipped.write_bytes(b"\0" + flipped.read_bytes()[1:])
    assert main(["stage", "--verify", str(target)]) == 1
    assert "train/c3/i 003+ü.jpg: its content has changed" in capsys.readouterr().out
    assert main(["stage", url, str(target)]) == 0
    assert files_of(target) == objects


def test_no_fault_of_the_network_makes_a_wrong_file_and_all_is_complete_after_running_again(
    s3_proxy: Proxy, objects: dict[str, bytes], tmp_path: Path
) -> None:
    target, url = tmp_path / "copy", f"s3://{BUCKET}/stage"
    faults = [
        s3_proxy.fault(r"GET /bucket/stage/train", kind, times=6, after=after, seconds=2.0)
        for kind in ("reset", "short", "flip")
        for after in (0, 1, 999, 50_000)
    ]
    faults += [
        s3_proxy.fault(r"GET /bucket/stage/shards", kind, times=2, after=after, seconds=2.0)
        for kind, after in (("reset", 5_000_000), ("short", 1), ("stall", 100_000), ("reset", 0), ("flip", 77))
    ]
    faults.append(s3_proxy.fault(r"GET /bucket/stage/medium", "flip", times=1, after=2_000_000))
    faults.append(s3_proxy.fault(r"GET /bucket/stage/train", "stall", times=4, after=10, seconds=2.0))
    faults.append(s3_proxy.fault(r"GET /bucket/stage/(train|medium)", "status", times=40, code=503))
    faults.append(s3_proxy.fault(r"GET /bucket/stage/train", "status", times=10, code=500))
    runs = 0
    while runs < 5:
        runs += 1
        summary = stage(url, target)
        copied = files_of(target)
        assert copied == {path: objects[path] for path in copied}, "a wrong file was accepted"
        if summary.complete:
            break
    assert copied == objects
    assert sum(fault.seen for fault in faults) >= 100
    assert verify_copy(LocalCopy(target, url), lambda _done, _total: None).whole
    assert not list(target.glob(".stage-*.tmp"))


def test_an_outage_is_waited_for_and_said_and_no_file_is_given_up(
    s3_proxy: Proxy, objects: dict[str, bytes], tmp_path: Path
) -> None:
    """With the patience that everybody has: a file is tried a few times a second, for longer than that."""
    said: list[str] = []

    def refuse() -> None:
        s3_proxy.stop()
        s3_proxy.outage = None
        wait_until(lambda: outage.text() is not None)
        said.append(outage.text() or "")
        s3_proxy.start()

    def break_down() -> None:
        s3_proxy.outage = "stall"  # nothing more is answered, however late the thread is
        threading.Thread(target=refuse).start()

    # When the first objects have arrived.
    s3_proxy.fault("GET /bucket/stage/train/c3", "call", call=break_down)
    summary = stage(f"s3://{BUCKET}/stage", tmp_path / "copy", patience=Patience())
    assert summary.failures == []
    assert files_of(tmp_path / "copy") == objects
    assert said
    assert said[0].startswith("waiting for 127.0.0.1:")
    assert outage.current() is None


def test_an_object_that_changes_while_it_is_copied_is_noticed(
    s3_proxy: Proxy, s3_server: S3Server, objects: dict[str, bytes], tmp_path: Path
) -> None:
    names = {"train/c0/i 004+ü.jpg": b"other bytes", "shards/large.tar": objects["shards/large.tar"][::-1]}
    patterns = {"train/c0/i 004+ü.jpg": "i%20004", "shards/large.tar": r"large.tar bytes=8388608"}
    for name, data in names.items():
        # Each time it is asked for: on a busy machine, the first request may be given up before the object is replaced.
        s3_proxy.fault(
            f"GET .*{patterns[name]}", "call", times=9,
            call=lambda name=name, data=data: s3_server.put(f"stage/{name}", data),
        )  # fmt: skip
    try:
        summary = stage(f"s3://{BUCKET}/stage", tmp_path / "copy")
        assert {path for path, reason in summary.failures if "changed" in reason} == set(names)
        assert not (tmp_path / "copy/shards/large.tar").exists()
        s3_proxy.reset()
        again = stage(f"s3://{BUCKET}/stage", tmp_path / "copy")
        assert again.complete
        assert again.copied_files == 2
        assert files_of(tmp_path / "copy") == objects | names
    finally:
        for name in names:
            s3_server.put(f"stage/{name}", objects[name])


def test_a_store_that_asks_to_slow_down_gets_fewer_requests_and_a_rate_limit_holds(
    s3_proxy: Proxy, objects: dict[str, bytes], tmp_path: Path
) -> None:
    s3_proxy.fault(r"GET /bucket/stage/train", "status", times=20, code=503)
    # Not in haste: what a busy machine answers late would be asked for once more.
    calm = stage(f"s3://{BUCKET}/stage/train", tmp_path / "calm", patience=Patience())
    assert calm.complete
    assert calm.concurrency < 32
    assert sum(calm.retries.values()) == 20
    s3_proxy.reset()
    limited = stage(f"s3://{BUCKET}/stage/train", tmp_path / "limited", StageOptions(limit_rate=2_000_000))
    assert limited.copied_bytes / limited.seconds < 2_600_000
    s3_proxy.reset()
    stage(f"s3://{BUCKET}/stage/train", tmp_path / "fixed", StageOptions(concurrency=3))
    assert s3_proxy.most_in_flight <= 3


@pytest.mark.parametrize(
    ("variables", "url", "name"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, f"s3://{BUCKET}/stage", "credentials-refused"),
        ({"AWS_SECRET_ACCESS_KEY": None, "AWS_ACCESS_KEY_ID": None}, f"s3://{BUCKET}/stage", "no-credentials"),
        ({}, "s3://no-such-bucket/x", "bucket-missing"),
        ({}, f"s3://{BUCKET}/empty-prefix", "nothing-to-stage"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, f"s3://{BUCKET}/stage", "store-unreachable"),
        ({}, "ftp://host/x", "unknown-store"),
    ],
)
def test_a_store_that_cannot_be_read_is_an_error_that_says_what_to_do(
    s3: S3Server,
    variables: dict[str, str | None],
    url: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for key, value in variables.items():
        monkeypatch.delenv(key)
        if value is not None:
            monkeypatch.setenv(key, value)
    assert main(["stage", url, str(tmp_path / "copy")]) == 1
    told = capsys.readouterr().err
    assert f"error: {name}" in told
    assert "hint:" in told
    assert "Traceback" not in told
    assert not [path for path in tmp_path.rglob("*") if not path.name.startswith(".stage") and path.name != "copy"]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls_is_spoken_and_a_certificate_that_is_not_trusted_ends_the_run(
    s3: S3Server, objects: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *names], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    proxy = Proxy(s3.port, tls=context).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    try:
        proxy.fault(r"GET /bucket/stage/train", "reset", times=5, after=100)
        assert stage(f"s3://{BUCKET}/stage", tmp_path / "copy").complete
        assert files_of(tmp_path / "copy") == objects
        monkeypatch.delenv("AWS_CA_BUNDLE")
        with pytest.raises(StokerError, match="respond"):
            stage(f"s3://{BUCKET}/stage", tmp_path / "other", patience=replace(HASTE, retry_s=1))
    finally:
        proxy.stop()
