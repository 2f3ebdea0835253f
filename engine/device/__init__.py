"""The device: loading a model onto it, warming it up, its memory budget, and the thread that owns it."""
