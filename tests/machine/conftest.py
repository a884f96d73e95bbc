"""A real object store, for measurements over a network."""

from tests.support.s3_server import s3, s3_proxy, s3_server

__all__ = ["s3", "s3_proxy", "s3_server"]
