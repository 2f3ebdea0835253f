"""Hidden states to embeddings, logits and scores: poolers, chunk state, heads and MaxSim.

Knows tensors and sequences; knows nothing of models, texts, requests or event loops.
"""
