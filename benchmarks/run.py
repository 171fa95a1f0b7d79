"""Run the benchmarks side by side, and write benchmarks/results and the table of the README.

    python benchmarks/run.py [couplings chains overhead weights gradients language_model plans
        compiled tiles offload drift flows]
    python benchmarks/run.py language_model_curve    # an hour for an epoch on two cores
    python benchmarks/run.py mnist                   # an hour on one core
    python benchmarks/run.py programs --threads 1    # after `make .venv/.foreign`; ten minutes
    python benchmarks/run.py foreign_flows           # after `make .venv/.foreign`; ten minutes
    python benchmarks/run.py plans --models ResNet-50    # beside what the file has of other models

Memory is counted (`recoup.measure`), time is processor time of one thread with the contestants in
turn; that of weights, of the language model, of plans, of tiles and of offloading is wall time of
all cores. Beside other work, processor time of one thread says more: `--threads 1` for plans.
Numbers are valid for the machine and the versions in the file.
"""

import argparse
import datetime
import importlib
import json
import os
import platform
import re
from importlib import metadata
from pathlib import Path

import readme
import torch

HERE = Path(__file__).parent
# Files in this folder; each has a generator `suite(device)` that yields tables with their names.
SUITES = (
    "couplings",
    "chains",
    "overhead",
    "weights",
    "gradients",
    "language_model",
    "plans",
    "compiled",
    "tiles",
    "offload",
    "budgets",
    "drift",
    "flows",
)
# Only when they are named.
LONG_SUITES = ("mnist", "language_model_curve", "programs", "foreign_flows")
ON_ALL_CORES = {
    "weights", "language_model", "language_model_curve", "plans", "compiled", "tiles", "offload",
    "budgets",
}  # fmt: skip


def conditions(device: str) -> dict:
    versions = {"python": platform.python_version()}
    rivals = ("memcnn", "revtorch", "revlib", "returnn", "pytorch-nlp", "torch_remat")
    rivals += ("nflows", "normflows", "FrEIA", "zuko", "accelerate", "trl", "sbi")
    for package in ("torch", *rivals, "transformers"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    is_cpu = device == "cpu"
    name = _processor() if is_cpu else torch.get_device_module(device).get_device_name()
    return {
        "device": device,
        "device_name": name,
        "num_threads": torch.get_num_threads(),
        **({} if is_cpu else {"allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")}),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": versions,
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = re.search(r"model name\s*: (.*)", text)
    return found.group(1) if found else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suites", nargs="*", choices=[[], *SUITES, *LONG_SUITES], default=[])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="+", help="of plans or compiled: no others")
    parser.add_argument("--threads", type=int, help="of suites that are timed on all cores")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="a folder")
    arguments = parser.parse_args()
    num_cores = arguments.threads or torch.get_num_threads()
    chosen = {"models": arguments.models} if arguments.models else {}
    for name in arguments.suites or SUITES:
        print(f"== {name}", flush=True)
        torch.set_num_threads(num_cores if name in ON_ALL_CORES else 1)
        result = {"suite": name, **conditions(arguments.device)}
        path = arguments.results / f"{name}_{arguments.device}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        known = json.loads(path.read_text()) if chosen and path.exists() else {}
        if known:
            result = beside(known, result, arguments.models)
        for key, rows in importlib.import_module(name).suite(arguments.device, **chosen):
            kept = [row for row in known.get(key, ()) if row["model"] not in chosen["models"]]
            result[key] = kept + rows if kept else rows
            path.write_text(json.dumps(result, indent=1) + "\n")  # what is stopped leaves a part
            if isinstance(rows, list):
                print(f"-- {key}")
                for row in rows:
                    print("  ", *(f"{k}={_short(v)}" for k, v in row.items()), flush=True)
    if arguments.device == "cpu" and arguments.results == HERE / "results":
        readme.write()


def beside(known: dict, conditions: dict, models: list[str]) -> dict:
    """Return what a file has of other models, with the conditions of these models beside it."""
    of_models = known.get("conditions_of", {}) | dict.fromkeys(models, conditions)
    return known | {"conditions_of": of_models}


def _short(value) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "/".join(_short(v) for v in value.values())
    return str(value)


if __name__ == "__main__":
    main()
