"""The tests and benchmarks on a CUDA device, in a bounded time, with the Python that runs this.

    python benchmarks/cuda.py [--results FOLDER] [--minutes 9]

Needs no network and no environment of its own: torch and pytest, and what else is missing is left
out, and said to be. Each part has a time limit, and what it had found by then stays in FOLDER as
JSON: `tests_cuda.json`, then a file a suite.
"""

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

try:
    import torch
except ModuleNotFoundError:
    sys.exit(f"{sys.executable} has no torch; name one that has: make cuda PYTHON=.venv/bin/python")

ROOT = Path(__file__).parent.parent
# Seconds for each part; the first come first if all of them together take too long.
TESTS_SECONDS = 200
SECONDS_TO_STOP = 8
SUITE_SECONDS = {
    "couplings": 45,
    "weights": 50,
    "plans": 120,
    "compiled": 120,
    "offload": 40,
    "gradients": 40,
    "flows": 60,
    "drift": 30,
    "language_model": 45,
}


def main() -> int:
    """Run all parts and return how many failed, or 0 if there is no device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("No GPU: torch finds no CUDA device here, so nothing was run.")
        return 0
    results = arguments.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    end = time.monotonic() + 60 * arguments.minutes - 10  # to write down what was stopped
    failed = [] if run_tests(results, end) else ["tests"]
    for name, limit in SUITE_SECONDS.items():
        command = [sys.executable, "benchmarks/run.py", name, "--device", "cuda"]
        command += ["--results", str(results)]
        if not run(name, command, min(limit, end - time.monotonic())):
            failed.append(name)
    print(f"Done. Not well: {', '.join(failed) or 'none'}. Results are in {results}.", flush=True)
    return len(failed)


def run_tests(results: Path, end: float) -> bool:
    """Run tests/cuda, and record what passed, what failed and why."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "tests/cuda", "-q", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", "--tb=short"]
        if importlib.util.find_spec("xdist") is not None:
            command += ["-n", "4"]
        start = time.monotonic()
        is_well = run("tests", command, min(TESTS_SECONDS, end - start))
        found = {
            "device_name": torch.cuda.get_device_name(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "seconds": round(time.monotonic() - start, 1),
            "is_finished": report.exists(),
            **(_outcomes(report) if report.exists() else {}),
        }
    (results / "tests_cuda.json").write_text(json.dumps(found, indent=1) + "\n")
    return is_well


def _outcomes(report: Path) -> dict:
    outcomes = {"num_passed": 0, "skipped": [], "failed": []}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        failure = case.find("failure")
        if failure is None:
            failure = case.find("error")
        skipped = case.find("skipped")
        if failure is not None:
            text = failure.text or ""
            outcomes["failed"].append({"name": name, "text": text[-3000:]})
        elif skipped is not None:
            outcomes["skipped"].append({"name": name, "reason": skipped.get("message")})
        else:
            outcomes["num_passed"] += 1
    return outcomes


def run(name: str, command: list[str], limit: float) -> bool:
    """Run a part for at most `limit` seconds and return whether it succeeded."""
    if limit < 5:
        print(f"== {name}: left out, since the time is over", flush=True)
        return False
    print(f"== {name}, for at most {limit:.0f} seconds", flush=True)
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment["PYTHONUNBUFFERED"] = "1"
    # A group of its own, so that workers of a part that takes too long end with it.
    part = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    start = time.monotonic()
    try:
        code = part.wait(limit)
    except subprocess.TimeoutExpired:
        print(f"== {name}: stopped after {limit:.0f} seconds", flush=True)
        part.send_signal(signal.SIGINT)  # pytest writes its report then
        with contextlib.suppress(subprocess.TimeoutExpired):
            part.wait(SECONDS_TO_STOP)
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(part.pid, signal.SIGKILL)
        part.wait()
    print(f"== {name}: exit status {code} after {time.monotonic() - start:.0f} seconds", flush=True)
    return code == 0


if __name__ == "__main__":
    sys.exit(main())
