"""The outside: HTTP routes, wire types, the command line and the metrics page.

Everything here speaks to the engine through its public methods.
"""
