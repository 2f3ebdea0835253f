"""Texts to token ids: tokenization, prompts, truncation, windows, the characters of each token."""
