"""Several engines behind one server: fronts take requests, each engine is a process of its own, and requests
are spread over the engines by `maxsimd.scheduler.fleet`.

What fronts and engines say to each other is in `messages`; on one machine Unix sockets carry it (`link`).
"""
