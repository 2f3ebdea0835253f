"""The HTTP server on aiohttp: the application, connections, and sockets with TLS."""
