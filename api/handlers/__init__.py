"""From a request's method, path, headers and body to an `Answer`, without any web server: routes, keys,
limits, request ids, timing, errors, the log line and metrics. Adapters (`api/http/app.py`) own connections
and decompression, and cancel `handle` when a client has gone away, which counts as status 499."""

from maxsimd.api.handlers.handle import handle, watch

__all__ = ["handle", "watch"]
