"""Attention over packed sequences: the interface, its backends, and the choice among them."""
