"""`maxsimd download`: a hub's checkpoint into a folder, with digests, for machines that reach no hub."""

import json
from fnmatch import fnmatch
from pathlib import Path

import click

from maxsimd.api.cli.files import Progress
from maxsimd.api.help import Command

# Other frameworks' weights, and pictures.
_OTHERS = """
    onnx/* openvino/* *.onnx *.h5 *.msgpack *.gguf *.ot *.png *.jpg *.gif .gitattributes
""".split()  # noqa: SIM905


@click.command(cls=Command)
@click.argument("model")
@click.option("--to", "folder", type=click.Path(file_okay=False), required=True, help="Folder to write")
@click.option("--revision", help="Branch, tag or commit")
@click.option("--check", is_flag=True, help="Only verify the checksums of the folder")
def download(model: str, folder: str, revision: str | None, check: bool) -> None:
    """Download MODEL from the hub into a folder, with checksums.

    `maxsimd serve FOLDER --offline` verifies them and contacts no hub. Files that exist are not downloaded
    again."""
    from maxsimd.engine.checkpoint.files import DIGESTS_FILE, INSTRUCTORS, check_digests, write_digests
    from maxsimd.engine.errors import ModelLoadError

    target = Path(folder)
    try:
        if check:
            compared = check_digests(target)
            if compared is None:
                raise click.ClickException(
                    f"there is no {DIGESTS_FILE} in {folder}; download the checkpoint first"
                )
            click.echo(f"{compared} files are what {DIGESTS_FILE} says")
            return
        _download(model, revision, target)
        if model in INSTRUCTORS:
            pooling = target / "1_Pooling" / "config.json"
            settings = json.loads(pooling.read_text(encoding="utf-8")) | {"include_prompt": False}
            pooling.write_text(json.dumps(settings, indent=2), encoding="utf-8")
        count = write_digests(target)
    except ModelLoadError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{count} files in {folder}; serve with: maxsimd serve {folder} --offline")


def wanted(names: list[str]) -> list[str]:
    """Leaves out weights of other frameworks, and pickles in folders that have a safetensors file."""
    mine = [name for name in names if not any(fnmatch(name, each) for each in _OTHERS)]
    safe = {Path(name).parent for name in mine if name.endswith(".safetensors")}
    return [
        name for name in mine if Path(name).parent not in safe or not fnmatch(name, "*pytorch_model*.bin*")
    ]


def _download(model: str, revision: str | None, target: Path) -> None:
    """Raises click.ClickException where the hub has no such model, or cannot be reached."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    progress = Progress("files")
    progress.note(f"asking the hub for {model}")
    try:
        info = HfApi().model_info(model, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        names = wanted(sorted(sizes))
        for number, name in enumerate(names, 1):
            progress.note(f"file {number} of {len(names)}: {name}, {sizes[name] / 1e6:,.1f} MB")
            hf_hub_download(model, name, revision=info.sha, local_dir=target)
    except Exception as error:
        # The client passes on what its HTTP library raises, which changes from version to version.
        reason = " ".join(str(error).split())
        raise click.ClickException(f"{model} cannot be downloaded: {reason}") from error
    finally:
        progress.end()
