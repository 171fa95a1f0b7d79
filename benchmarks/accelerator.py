"""The tests and benchmarks on an accelerator, in a bounded time, with the Python that runs this.

    python benchmarks/accelerator.py [--results FOLDER] [--minutes 9] [--small] [--parts NAME ...]

Needs no network and no environment of its own: torch, and what else is missing is left out, and
said to be. Parts come in the order of what a reader would ask. Each has a time limit, and what it
had found by then stays in FOLDER as JSON: `tests_cuda.json`, then a file a suite. `--small` runs
tiny sizes of everything, where there is no accelerator on the CPU.
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
    way = "name one that has: make accelerator PYTHON=.venv/bin/python"
    sys.exit(f"{sys.executable} has no torch; {way}")

ROOT = Path(__file__).parent.parent
SECONDS_TO_STOP = 8
# The arguments of benchmarks/run.py of each part, and its seconds; the first come first if all of
# them together take too long.
PARTS = {
    "tests": ((), 130),
    "budgets of GPT-2": (("budgets", "--models", "GPT-2"), 100),
    "budgets of Llama": (("budgets", "--models", "Llama"), 95),
    "budgets of ViT": (("budgets", "--models", "ViT"), 90),
    "budgets of ResNet-50": (("budgets", "--models", "ResNet-50"), 50),
    "offload": (("offload",), 35),
    "weights": (("weights",), 40),
    "flows": (("flows",), 50),
}


def main() -> int:
    """Run all parts and return how many failed, or 0 if there is no device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together")
    parser.add_argument("--small", action="store_true", help="tiny sizes, on the CPU if need be")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS], metavar="NAME")
    arguments = parser.parse_args()
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None and not arguments.small:
        print("No accelerator: torch finds no GPU here, so nothing was run; --small needs none.")
        return 0
    device = "cpu" if found is None else found.type
    results = arguments.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    print(f"{name_of(device)}, torch {torch.__version__}", flush=True)
    end = time.monotonic() + 60 * arguments.minutes - 10  # to write down what was stopped
    failed = []
    for name in arguments.parts:
        options, limit = PARTS[name]
        limit *= 4 if arguments.small else 1  # the limits are those of an accelerator
        limit = min(limit, end - time.monotonic())
        command = [sys.executable, "benchmarks/run.py", *options, "--device", device]
        command += ["--results", str(results)]
        is_well = (
            run(name, command, limit, is_small=arguments.small)
            if options
            else run_tests(results, device, limit)
        )
        failed += [] if is_well else [name]
    print(f"Done. Not well: {', '.join(failed) or 'none'}. Results are in {results}.", flush=True)
    return len(failed)


def name_of(device: str) -> str:
    if device == "cpu":
        return platform.processor() or platform.machine()
    return torch.get_device_module(device).get_device_name()


def run_tests(results: Path, device: str, limit: float) -> bool:
    """Run tests/cuda, and record what passed, what failed and why."""
    if importlib.util.find_spec("pytest") is None:
        print("== tests: left out, since pytest is not installed", flush=True)
        return False
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "tests/cuda", "-q", "-p", "no:cacheprovider"]
        command += ["-p", "no:benchmark"]  # which warns of xdist, where it is installed
        command += [f"--junitxml={report}", "--tb=short"]
        if importlib.util.find_spec("xdist") is not None:
            command += ["-n", str(min(8, max(1, (os.cpu_count() or 1) // 2)))]
        start = time.monotonic()
        is_well = run("tests", command, limit)
        found = {
            "device_name": name_of(device),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "seconds": round(time.monotonic() - start, 1),
            "is_finished": report.exists(),
            **(_outcomes(report) if report.exists() else {}),
        }
    (results / f"tests_{device}.json").write_text(json.dumps(found, indent=1) + "\n")
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


def run(name: str, command: list[str], limit: float, *, is_small: bool = False) -> bool:
    """Run a part for at most `limit` seconds and return whether it succeeded."""
    if limit < 5:
        print(f"== {name}: left out, since the time is over", flush=True)
        return False
    print(f"== {name}, for at most {limit:.0f} seconds", flush=True)
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment["PYTHONUNBUFFERED"] = "1"
    environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if is_small:
        environment["RECOUP_QUICK"] = "1"
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
