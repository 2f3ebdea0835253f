"""Attention over packed sequences: one interface, one backend a file, and the choice among them."""
