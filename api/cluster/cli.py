"""`maxsimd cluster`: scoring on many machines, by Ray."""

import click


@click.group()
def cluster() -> None:
    """Scores on many machines, by Ray; needs `pip install 'maxsimd[ray]'`."""
