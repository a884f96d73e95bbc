"""Responses of a server, byte by byte: whole ones are read, and nothing else is taken for one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from stoker.core.errors import UserError
from stoker.stage.s3_requests import BadResponse, Connections, Keys, S3Place, Signer
from stoker.stage.sources import open_source

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def place(port: int) -> S3Place:
    return S3Place("127.0.0.1", port, None, "/bucket", "a b", "us-east-1", Keys("id", "secret", None))


@contextmanager
def server(connections: Sequence[Sequence[bytes]]) -> Iterator[Connections]:
    """Answers each request of each connection with these bytes, and then closes it."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        for responses in connections:
            connection, _ = listening.accept()
            with connection:
                for response in responses:
                    connection.recv(65536)
                    for part in (response[:7], response[7:30], response[30:]):  # headers arrive in pieces, too
                        connection.sendall(part)

    thread = threading.Thread(target=answer)
    thread.start()
    client = Connections(place(listening.getsockname()[1]), 5, 5)
    try:
        yield client
        thread.join()
    finally:
        client.close()
        listening.close()


@pytest.mark.parametrize(
    ("response", "body"),
    [
        (HEAD + b"Content-Length: 3\r\n\r\nabc", b"abc"),
        (HEAD + b"Content-Length: 0\r\n\r\n", b""),
        (HEAD + b"Content-Length: 200000\r\n\r\n" + b"x" * 200_000, b"x" * 200_000),
        (CHUNKED + b"3\r\nabc\r\n5;name=1\r\ndefgh\r\n0\r\n\r\n", b"abcdefgh"),
        (CHUNKED + b"1ffff\r\n" + b"y" * 0x1FFFF + b"\r\n0\r\n\r\n", b"y" * 0x1FFFF),
        (b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nno\r\n0\r\n\r\n", b"no"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    ],
)
def test_a_whole_response_is_read(response: bytes, body: bytes) -> None:
    with server([[response]]) as client:
        assert bytes(client.exchange("GET", b"GET / HTTP/1.1\r\n\r\n", 5).body) == body


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (HEAD + b"\r\nabc", "without a length"),
        (HEAD + "Content-Length: \N{SUPERSCRIPT TWO}\r\n\r\nabc".encode("latin-1"), "without a length"),
        (HEAD + b"Content-Length: 2\r\n\r\nabc", "more bytes"),
        (HEAD + b"Content-Length: 4\r\n\r\nabc", "ended early"),
        (CHUNKED + b"3\r\nabcdef\r\n0\r\n\r\n", "another length"),
        (CHUNKED + b"-3\r\nabc\r\n0\r\n\r\n", "without a length"),
        (CHUNKED + b"3\r\nabc\r\n", "ended early"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "not a response"),
        (HEAD + b"x" * 100_000, "headers without an end"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 9000000\r\n\r\n", "a page of 9000000 bytes"),
    ],
)
def test_nothing_else_is_taken_for_a_response(response: bytes, reason: str) -> None:
    with server([[response]]) as client, pytest.raises(BadResponse, match=reason):
        client.exchange("GET", b"GET / HTTP/1.1\r\n\r\n", 5)


def test_a_connection_that_the_server_closed_meanwhile_is_replaced() -> None:
    answer = HEAD + b"Content-Length: 1\r\n\r\n1"
    with server([[answer, answer], [answer]]) as client:
        for _ in range(3):
            assert bytes(client.exchange("GET", b"GET / HTTP/1.1\r\n\r\n", 5).body) == b"1"


def test_a_head_of_a_response_has_no_body_whatever_length_it_tells() -> None:
    answer = HEAD + b"Content-Length: 70\r\n\r\n"
    with server([[answer, answer]]) as client:
        for _ in range(2):
            assert bytes(client.exchange("HEAD", b"HEAD / HTTP/1.1\r\n\r\n", 5).body) == b""


def test_requests_hide_their_keys_and_quote_names() -> None:
    where = place(9000)
    assert "secret" not in repr(where.keys)
    assert "secret" not in repr(where)
    assert where.path_of("ü+/é?.jpg") == "/bucket/a%20b/%C3%BC%2B/%C3%A9%3F.jpg"
    request = Signer(where).request("GET", where.path_of("1.jpg"), {"range": "bytes=0-1"}).decode()
    assert request.startswith("GET /bucket/a%20b/1.jpg HTTP/1.1\r\nhost: 127.0.0.1:9000\r\nrange: bytes=0-1\r\n")
    assert "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date" in request
    assert replace(where, host="::1").host_header == "[::1]:9000"


@pytest.mark.parametrize(
    ("endpoint", "name"), [("http://127.0.0.1:99999", "bad-endpoint"), ("https://127.0.0.1:9", "bad-certificates")]
)
def test_a_wrong_port_or_bundle_of_certificates_is_named(
    endpoint: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_CA_BUNDLE": "/nowhere.pem"}
    for key, value in {**settings, "AWS_ENDPOINT_URL": endpoint}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UserError) as caught:
        open_source("s3://bucket/x")
    assert caught.value.name == name
