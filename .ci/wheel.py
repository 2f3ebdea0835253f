"""Builds the wheel as it is published, looks into it, installs it into an environment of its own and serves
from it, without a compiler. Then it builds another one of the sdist where there is no compiler, and looks at
what that says of itself.

Run by the Python of `.venv`. The new environments borrow the libraries of `.venv`, so that nothing is
downloaded, but `maxsimd` itself must come from the wheel: it runs in a temporary folder, not in the checkout.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from repair_wheel import repair

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
READY_SECONDS = 300
# glibc of the oldest systems that published wheels support: manylinux_2_28 (AlmaLinux 8, Debian 10).
NEWEST_GLIBC = 28
REQUEST = {
    "query": "What is the capital of France?",
    "documents": [
        "Berlin lies on the Spree.",
        "Paris is the capital of France.",
        "Bread needs flour, water, salt and time.",
        "Lyon is a city in France.",
    ],
}
RANKING = [1, 3, 0, 2]


def require(met: bool, complaint: str) -> None:
    if not met:
        raise SystemExit(f"wheel: {complaint}")


def tracked_files() -> list[str]:
    """The files of the checkout as they are now, committed or not, without what git ignores."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [name for name in names if name and (ROOT / name).is_file()]


def build_sdist(folder: Path) -> Path:
    """Builds from a copy, so that neither an old `build/` nor a library compiled in place gets in."""
    copy = folder / "checkout"
    for name in tracked_files():
        if not name.startswith(("tests/", "bench/results/")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    command = [sys.executable, "-c", code, str(folder / "sdist")]
    (folder / "sdist").mkdir()
    subprocess.run(command, cwd=copy, check=True, capture_output=True)
    [sdist] = (folder / "sdist").iterdir()
    return sdist


def build(sdist: Path, folder: Path, environment: dict[str, str]) -> Path:
    """The wheel that pip builds of the sdist."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    if int(version("setuptools").split(".")[0]) >= 77:  # what [build-system] requires
        pip.append("--no-build-isolation")
    subprocess.run([*pip, "--wheel-dir", str(folder), str(sdist)], env=environment, check=True)
    [wheel] = folder.iterdir()
    return wheel


def without_compiler(environment: dict[str, str], folder: Path) -> dict[str, str]:
    """The environment as it is where no compiler is installed: this Python is the only command."""
    folder.mkdir()
    (folder / "python").symlink_to(sys.executable)
    kept = {name: value for name, value in environment.items() if name not in ("CC", "CXX", "LDSHARED")}
    kept["PATH"] = str(folder)
    for compiler in ("cc", "c++", "gcc", "g++", "clang", "clang++"):
        require(shutil.which(compiler, path=kept["PATH"]) is None, f"{compiler} is still there")
    return kept


def check_contents(wheel: Path, *, compiled: bool) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    tables = SETTINGS["tool"]["setuptools"]
    inside = {tables["package-dir"][package]: package.replace(".", "/") for package in tables["packages"]}
    for path in map(Path, tracked_files()):
        package = inside.get(str(path.parent))
        require(package is None or f"{package}/{path.name}" in held, f"{path} is missing")
    require("maxsimd/py.typed" in held, "py.typed is missing")
    for extension in tables["ext-modules"]:
        library = extension["name"].replace(".", "/") + sysconfig.get_config_var("EXT_SUFFIX")
        wrong = f"{library} is missing: was there a compiler?" if compiled else f"{library} is there"
        require((library in held) == compiled, wrong)
    foreign = [name for name in held if not re.match(r"maxsimd(-[^/]+\.dist-info)?/", name)]
    tests = [name for name in held if re.search(r"(^|/)(tests?/|test_|conftest)", name)]
    require(not foreign and not tests, f"these do not belong into it: {sorted({*foreign, *tests})}")


def install(wheel: Path, folder: Path) -> Path:
    """A new environment with the wheel. Returns its `bin`."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheel)], check=True)
    # Python reads no .pth files in a folder that a .pth file names: the editable install's finder stays out.
    borrowed = "\n".join(path for path in sys.path if Path(path).name == "site-packages")
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(borrowed + "\n", encoding="utf-8")
    return folder / "bin"


def check_import(binaries: Path, outside: Path, environment: dict[str, str]) -> None:
    def run(*arguments: str) -> str:
        command = [str(binaries / "python"), *arguments]
        return subprocess.run(
            command, cwd=outside, env=environment, check=True, capture_output=True, text=True
        ).stdout

    code = (
        "import maxsimd, maxsimd.engine.ops.cpu.library as library;"
        "print(maxsimd.__file__, library.__file__, maxsimd.Engine.__module__)"
    )
    package, library, module = run("-c", code).split()
    for file in (package, library):
        require(Path(file).is_relative_to(binaries.parent), f"{file} is not the wheel's")
    require(module == "maxsimd.engine.engine", f"maxsimd.Engine is of {module}")
    stated, shown = SETTINGS["project"]["version"], run("-m", "maxsimd", "--version").strip()
    require(shown == f"maxsimd, version {stated}", f"python -m maxsimd --version says {shown!r}")


@contextmanager
def server(binaries: Path, outside: Path, environment: dict[str, str]) -> Iterator[str]:
    """Serves the embedded model on a free port and yields the address. Then SIGTERM must end it with 0."""
    log = outside / "server.log"
    with log.open("wb") as out:
        command = [str(binaries / "maxsimd"), "serve", "--port", "0"]
        process = subprocess.Popen(command, cwd=outside, env=environment, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + READY_SECONDS
        while (ready := re.search(r"INFO +(http://\S+)/\n", log.read_text(encoding="utf-8"))) is None:
            running = process.poll() is None and time.monotonic() < deadline
            require(running, f"the server did not become ready:\n{log.read_text(encoding='utf-8')}")
            time.sleep(0.05)
        yield ready[1]
        process.send_signal(signal.SIGTERM)
        status = process.wait(timeout=30)
        require(status == 0, f"the server ended with {status}:\n{log.read_text(encoding='utf-8')}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def check_ranking(address: str) -> None:
    request = urllib.request.Request(
        address + "/rerank", json.dumps(REQUEST).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        results = json.load(answer)["results"]
    ranking = [result["index"] for result in results]
    require(ranking == RANKING, f"the ranking is {ranking}, not {RANKING}")


def check_page(address: str) -> None:
    with urllib.request.urlopen(address + "/", timeout=30) as answer:
        page = answer.read().decode("utf-8")
    require("<title>maxsimd playground</title>" in page, f"/ is not the playground: {page[:200]!r}")
    require("/*{{" not in page, "the playground lacks its style or script")


def check_tag(wheel: Path) -> None:
    """Requires a tag by which pip takes the wheel on machines with older systems than this one."""
    if sys.platform != "linux":
        return
    found = re.search(r"manylinux_2_(\d+)_", wheel.name)
    is_old = found is not None and int(found[1]) <= NEWEST_GLIBC
    require(is_old, f"{wheel.name} has no manylinux tag to publish")


def check_words(binaries: Path, outside: Path, environment: dict[str, str]) -> str:
    """The line of `maxsimd inspect` about kernels where none were compiled."""
    command = [str(binaries / "maxsimd"), "inspect"]
    told = subprocess.run(command, cwd=outside, env=environment, check=True, capture_output=True, text=True)
    [kernels] = re.findall(r"^kernels +(.*)$", told.stdout, re.MULTILINE)
    require(kernels.startswith("plain torch: the kernels"), f"kernels: {kernels}")
    return str(kernels)


def main() -> None:
    begun = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"HF_HUB_OFFLINE": "1", "MAXSIMD_DRAIN_SECONDS": "0"}
    with tempfile.TemporaryDirectory(prefix="maxsimd-wheel-") as name:
        folder = Path(name)
        outside = folder / "outside"
        outside.mkdir()
        sdist = build_sdist(folder)
        bare = without_compiler(environment, folder / "commands")
        wheel = repair(build(sdist, folder / "built", environment), folder / "published")
        check_contents(wheel, compiled=True)
        check_tag(wheel)
        plain = repair(build(sdist, folder / "built-plain", bare), folder / "published-plain")
        check_contents(plain, compiled=False)
        check_tag(plain)
        built = time.monotonic()
        binaries = install(wheel, folder / "environment")
        check_import(binaries, outside, bare)
        with server(binaries, outside, bare) as address:
            check_ranking(address)
            check_page(address)
        kernels = check_words(install(plain, folder / "environment-plain"), outside, bare)
        print(
            f"{wheel.name} works: built in {built - begun:.0f} s, tried in {time.monotonic() - built:.0f} s;"
            f" without a compiler {plain.name} says: {kernels}"
        )


if __name__ == "__main__":
    main()
