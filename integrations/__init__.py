"""Adapters that put an engine of this process where frameworks have a seat for a reranker. Each is imported
by itself, where its framework is installed."""
