"""`maxsimd cluster`: scoring on many machines, by Ray."""

import click

from maxsimd.api.cluster.score_command import score


@click.group()
def cluster() -> None:
    """Scores on many machines, by Ray; needs `pip install 'maxsimd[ray]'`."""


cluster.add_command(score)
