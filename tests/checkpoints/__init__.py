"""Small random-weight checkpoints in the formats in which real ones are published: same files, same tensor
names, same keys of their configs. `families` lists them."""
