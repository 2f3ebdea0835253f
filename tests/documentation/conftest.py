"""The documentation's requests are sent to the same server as the tests of HTTP."""

from tests.server.conftest import server, session_starter

__all__ = ["server", "session_starter"]
