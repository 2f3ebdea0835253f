"""Hidden states to embeddings and logits. Knows tensors and sequences, not models, texts or requests."""
