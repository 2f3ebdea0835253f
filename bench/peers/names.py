"""The names of what `maxsimd bench peers` runs, which its help says without loading what it takes."""

# Contests with one cross-encoder, and experiments in which no peer takes part.
CROSS_ENCODER = ("cross-encoder", "pairs", "single", "documents", "load")
ALONE = ("cache", "cache-int8", "prefix", "scaling", "ranking")
EXPERIMENTS = (*CROSS_ENCODER, "colbert", "maxsim", *ALONE)
