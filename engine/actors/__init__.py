"""The actors: each owns some state and is the only one to touch it; typed messages pass between them."""
