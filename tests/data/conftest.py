"""The S3 server and the proxy before it, for the tests of this folder."""

from tests.support.s3_server import s3, s3_proxy, s3_server

__all__ = ["s3", "s3_proxy", "s3_server"]
