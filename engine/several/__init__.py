"""Several models in one process: each an engine of its own, that come, go and fail without the others."""
