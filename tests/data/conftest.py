"""The S3 server and the proxy in front of it, for the tests in this folder."""

from tests.support.s3_server import s3, s3_proxy, s3_server

__all__ = ["s3", "s3_proxy", "s3_server"]
