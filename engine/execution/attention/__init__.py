"""Attention over packed sequences: one interface, a backend a file, and the choice among them."""
