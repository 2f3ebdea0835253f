"""This server beside its peers: the same checkpoint, the same requests, in turns, in one run.

A peer that is not installed is left out. Every system runs in processes of its own, as its users run it.
"""
