"""Writes the recipes of the embedded model that come with the package: `python -m tests.embedded_recipes`."""

import msgspec

from maxsimd.engine.checkpoint.load import embedded_recipes
from maxsimd.engine.checkpoint.recipe_store import SHIPPED

if __name__ == "__main__":
    SHIPPED.write_bytes(msgspec.json.format(msgspec.json.encode(embedded_recipes()), indent=1) + b"\n")
