"""Fixtures for tests of the simulator."""

from tests.host.conftest import kernel_cache  # noqa: F401 (programs stay in the user's kernel cache)
