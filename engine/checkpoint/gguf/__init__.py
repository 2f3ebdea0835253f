"""GGUF files: one file with a model's settings, its tokeniser and its weights, most of them quantised.

Source: the specification of the format (github.com/ggml-org/ggml, docs/gguf.md) and llama.cpp's conversion
scripts, whose changes to names and weights are taken back here. The package gguf reads the file."""
