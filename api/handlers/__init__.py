"""The handlers: from a request's method, path, headers and body to an `Answer`, by no web server's means.

Theirs is all that every server in front of them would have to do alike: routes and methods, keys, the limits
on bodies and on documents, request ids, timing, the one shape of errors, counting what is in flight, the log
line and the metrics. Left to the adapter (`api/http/app.py`): connections, whether a HEAD's body is sent,
decompression, closing connections while the server drains, and cancelling `handle` when the client has gone
away. Cancelling it cancels the work and is counted with status 499.
"""

from maxsimd.api.handlers.handle import handle

__all__ = ["handle"]
