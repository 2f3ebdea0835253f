"""The outside: HTTP routes, wire types, the command line and the metrics page. It uses the engine's public
methods."""
