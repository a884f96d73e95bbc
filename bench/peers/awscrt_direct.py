"""AWS's own client, used directly: downloads the objects of a list, each to its file, validating checksums.

    python -m bench.peers.awscrt_direct get LIST TARGET IN_FLIGHT
    python -m bench.peers.awscrt_direct put LIST BYTES      uploads as many objects, with CRC64NVME

The endpoint and keys are those of the environment (AWS_ENDPOINT_URL and so on).
"""

from __future__ import annotations

import io
import os
import random
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import awscrt.auth  # type: ignore[import-not-found,import-untyped,unused-ignore]
import awscrt.http  # type: ignore[import-not-found,import-untyped,unused-ignore]
import awscrt.io  # type: ignore[import-not-found,import-untyped,unused-ignore]
import awscrt.s3  # type: ignore[import-not-found,import-untyped,unused-ignore]


def client() -> Any:
    group = awscrt.io.EventLoopGroup(len(os.sched_getaffinity(0)))
    bootstrap = awscrt.io.ClientBootstrap(group, awscrt.io.DefaultHostResolver(group))
    keys = awscrt.auth.AwsCredentialsProvider.new_static(
        os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    )
    region = os.environ["AWS_REGION"]
    return awscrt.s3.S3Client(
        bootstrap=bootstrap,
        region=region,
        tls_mode=awscrt.s3.S3RequestTlsMode.DISABLED,
        signing_config=awscrt.s3.create_default_s3_signing_config(region=region, credential_provider=keys),
    )


def request(method: str, name: str, headers: list[tuple[str, str]], body: Any = None) -> Any:
    host = urlsplit(os.environ["AWS_ENDPOINT_URL"]).netloc
    listed = awscrt.http.HttpHeaders([("host", host), *headers])
    return awscrt.http.HttpRequest(method, f"/{os.environ['BUCKET']}/{quote(name)}", listed, body)


class Flight:
    """So many requests at once; the first error is raised at the end."""

    def __init__(self, most: int) -> None:
        self._free, self._most = threading.Semaphore(most), most
        self.errors: list[Any] = []
        self.validated = 0

    def begin(self) -> Any:
        self._free.acquire()
        return self._done

    def _done(self, error: Any = None, did_validate_checksum: bool = False, **_: Any) -> None:
        if error is not None:
            self.errors.append(error)
        self.validated += did_validate_checksum
        self._free.release()

    def land(self) -> None:
        for _ in range(self._most):
            self._free.acquire()
        if self.errors:
            raise self.errors[0]


def get(names: list[str], target: Path, in_flight: int) -> None:
    for folder in {(target / name).parent for name in names}:
        folder.mkdir(parents=True, exist_ok=True)
    s3, flight = client(), Flight(in_flight)
    checked = awscrt.s3.S3ChecksumConfig(validate_response=True)
    requests = []
    for name in names:
        done = flight.begin()
        requests.append(
            s3.make_request(
                type=awscrt.s3.S3RequestType.GET_OBJECT, request=request("GET", name, []),
                recv_filepath=str(target / name), checksum_config=checked, on_done=done,
            )
        )  # fmt: skip
    flight.land()
    assert flight.validated == len(names), f"{flight.validated} of {len(names)} checksums validated"


def put(names: list[str], size: int) -> None:
    s3, flight = client(), Flight(32)
    kept = awscrt.s3.S3ChecksumConfig(
        algorithm=awscrt.s3.S3ChecksumAlgorithm.CRC64NVME, location=awscrt.s3.S3ChecksumLocation.TRAILER
    )
    noise = random.Random(0).randbytes(4 * size)
    requests = []
    for number, name in enumerate(names):
        # From 0.9 to 1.1 times the size.
        data = noise[number : number + size * 9 // 10 + number * 7919 % (size // 5)]
        done = flight.begin()
        requests.append(
            s3.make_request(
                type=awscrt.s3.S3RequestType.PUT_OBJECT,
                request=request("PUT", name, [("content-length", str(len(data)))], io.BytesIO(data)),
                checksum_config=kept, on_done=done,
            )
        )  # fmt: skip
    flight.land()


if __name__ == "__main__":
    what, listed, *rest = sys.argv[1:]
    wanted = Path(listed).read_text().split("\n")
    if what == "get":
        get(wanted, Path(rest[0]), int(rest[1]))
    else:
        put(wanted, int(rest[0]))
