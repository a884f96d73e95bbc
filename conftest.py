"""Isolates the tests from the process that starts them, before anything else of theirs is imported.

Not in tests/conftest.py: programs that the tests start import that one too, with surroundings that a test made.
"""

from tests.support.isolation import isolate

isolate()
# Fixtures for all folders; imported by each of them, there would be a server for each.
pytest_plugins = ["tests.support.s3_server"]
