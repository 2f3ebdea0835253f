"""Model architectures. Nothing here reads files, and nothing depends on how a model is served.

`bert` has the encoders that are served without transformers. The other modules are architectures that
transformers lacks, or whose tensors it does not read as they are published: classes in its style, which
`registered` makes known to its Auto classes.
"""
