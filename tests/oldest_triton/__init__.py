"""An environment that has the oldest triton that we allow, and behind it all packages of ours."""

import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).parents[2]
_FOLDER = ROOT / ".venv-clients" / "oldest-triton"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def interpreter() -> str:
    """The environment's Python. Makes the environment at first, and anew when what it needs has changed."""
    behind = sysconfig.get_paths()["purelib"]
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes() + behind.encode()).hexdigest()
    stamp = _FOLDER / "installed"
    python = _FOLDER / "bin" / "python"
    _FOLDER.parent.mkdir(exist_ok=True)
    with FileLock(f"{_FOLDER}.lock"):
        if stamp.exists() and stamp.read_text() == wanted:
            return str(python)
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", _FOLDER], check=True)
        asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
        own = Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())
        # Earlier folders on the path hide later ones.
        (own / "behind.pth").write_text(f"import site; site.addsitedir({behind!r})\n")
        pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", "--no-deps", "-r", str(REQUIREMENTS)], check=True)
        stamp.write_text(wanted)
    return str(python)
