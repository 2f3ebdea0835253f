"""Small random-weight checkpoints with the files, tensor names and configs of published ones."""
