"""Embeddings to scores: similarity, MaxSim, and what queries and windows of a request wait for."""
