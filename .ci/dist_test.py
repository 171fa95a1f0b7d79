"""Build a wheel and an sdist, and test them as a user gets them: without the repository.

The wheel is built from the unpacked sdist, so that the sdist has what a build needs. Both must have
the files that git tracks, the wheel those of the packages. The wheel is installed in a new virtual
environment, first alone and then with its extras, and tests that lie in the sdist run against it.
`make dist-test` calls this with the Python of `.venv`, which has hatchling.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Public names, documentation and examples; a room without torch; the command line.
TESTS = ["tests/api", "tests/unit/schedules", "tests/unit/test_command.py"]
QUICK = "not slow and not foreign and not exhaustive"
# Of what git tracks, the sdist leaves out what serves the repository alone.
LEFT_OUT = (".ci/", ".github/", ".pre-commit-config.yaml")
# Neither this repository nor anything else that the environment names may help.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
ALONE = """
import sys
import recoup
from recoup.schedules import simulate, sqrt
assert recoup.__file__.startswith(sys.prefix), recoup.__file__
print(f"installed: recoup {recoup.__version__}, sqrt(100) runs {simulate(sqrt(100)).num_forwards}")
"""


def main(out: Path) -> None:
    """Build into the folder `out`, and test what was built."""
    out.mkdir(exist_ok=True)
    for old in [*out.glob("*.whl"), *out.glob("*.tar.gz")]:
        old.unlink()
    with tempfile.TemporaryDirectory(prefix="recoup-") as name:
        folder = Path(name)
        sdist = built("sdist", ROOT, out)
        unpacked = unpack(sdist, folder)
        check_sdist(unpacked)  # before the build writes bytecode there
        wheel = built("wheel", unpacked, out)
        check_wheel(wheel)
        test(wheel, unpacked, folder / "venv")
    print(f"{wheel.name} and {sdist.name} are in {out}.")


def built(target: str, source: Path, out: Path) -> Path:
    """Return the wheel or the sdist that is built from the folder `source`."""
    before = set(out.iterdir())
    run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", out, cwd=source)
    (path,) = set(out.iterdir()) - before
    return path


def unpack(sdist: Path, folder: Path) -> Path:
    """Return the folder with the files of an sdist."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    return unpacked


def tracked() -> set[str]:
    """Return the paths of all files that git tracks."""
    listed = run("git", "ls-files", "-z", cwd=ROOT, capture_output=True).stdout
    return {path for path in listed.split("\0") if path and (ROOT / path).is_file()}


def check_sdist(unpacked: Path) -> None:
    """Compare the files of an sdist with those that git tracks."""
    wanted = {path for path in tracked() if not path.startswith(LEFT_OUT)}
    found = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    compare("sdist", found - {"PKG-INFO"}, wanted)


def check_wheel(wheel: Path) -> None:
    """Compare the files of a wheel with those of the packages, and read its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    wanted = {path.removeprefix("src/") for path in tracked() if path.startswith("src/")}
    compare("wheel", {name for name in names if not name.startswith(info)}, wanted)
    if f"{info}/licenses/LICENSE" not in names or "recoup = recoup.__main__:main" not in scripts:
        raise SystemExit("The wheel lacks its license or its command.")
    for field in ("Name", "Version", "License-Expression", "Requires-Python", "Summary"):
        print(f"{field}: {metadata[field]}")
    for address in metadata.get_all("Project-URL", []):
        print(f"Project-URL: {address}")


def compare(what: str, found: set[str], wanted: set[str]) -> None:
    """End with what is missing, or is too much."""
    missing, more = sorted(wanted - found), sorted(found - wanted)
    if missing or more:
        raise SystemExit(f"The {what} lacks {missing} and should not have {more}.")
    print(f"{what}: {len(found)} files, as in the repository")


def test(wheel: Path, unpacked: Path, venv: Path) -> None:
    """Install the wheel in a new environment, and run tests of the sdist against it."""
    python = venv / ("Scripts" if os.name == "nt" else "bin") / "python"
    run(sys.executable, "-m", "venv", venv)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    pip += ["--constraint", unpacked / "constraints.txt"]
    pip += shlex.split(os.environ.get("PIP_ARGS", ""))
    run(*pip, wheel)
    run(python, "-c", ALONE, cwd=venv)
    run(python.with_name("recoup"), "--version", cwd=venv)
    run(*pip, f"{wheel}[test,examples]")
    # As a module, so that `tests` is found; `recoup` is not, since `src` is not on the path.
    run(python, "-m", "pytest", "-q", "-n", "2", "-m", QUICK, *TESTS, cwd=unpacked)


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command, and end with its exit code if it fails."""
    done = subprocess.run(
        [str(part) for part in command], env=ENVIRONMENT, text=True, check=False, **options
    )
    if done.returncode:
        raise SystemExit(done.returncode)
    return done


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
