"""Runs the cases: tools/e2e starts it with the Python of the environment that has vLLM."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import secrets
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.dont_write_bytecode = True
sys.path[:0] = [str(HERE), str(ROOT / "clients" / "python" / "src")]
os.environ["PYTHONPATH"] = str(ROOT / "clients" / "python" / "src")

import cases_apart as apart  # noqa: E402
import cases_basic as basic  # noqa: E402
import cases_faults as faults  # noqa: E402
import cases_http as http  # noqa: E402
import cases_options as options  # noqa: E402
import engine  # noqa: E402
import models  # noqa: E402
import shm  # noqa: E402
from world import Bench, World, world  # noqa: E402

ALL = tuple(models.MODELS)


@dataclass(frozen=True)
class Case:
    """A function that raises when something is not as it should be, and a model to run it with."""

    function: Callable[[World], None]
    model: str

    @property
    def name(self) -> str:
        return f"{self.function.__name__}-{self.model}"


CASES = [
    Case(function, model)
    for model in ALL
    for function in (
        basic.comparison_can_fail,
        basic.cold_and_warm,
        basic.staged,
        basic.turns,
        basic.engine_restarted,
        basic.two_engines,
        basic.aborted,
        basic.preempted,
        faults.daemon_killed,
        faults.lookups_late,
        faults.loads_late,
        faults.l2_damaged,
        faults.l3_damaged,
        apart.salts_apart,
        apart.models_apart,
    )
]
CASES += [
    Case(basic.loaded_in_step, "llama"),
    Case(basic.hybrid_manager_off, "gemma3"),
    Case(options.cache_reset, "gemma3"),
    Case(options.damaged_in_step, "llama"),
    Case(options.quantised, "llama"),
    Case(options.quantised, "gemma3"),
    Case(apart.adapters_apart, "llama"),
    Case(http.http_server, "gemma3"),
]


def run_case(bench: Bench, case: Case, seed: int) -> dict[str, object]:
    """One line of the log, in the form that meson's test logs have (tools/test-summary)."""
    began = time.monotonic()
    text = ""
    try:
        with world(bench, case.name, case.model, seed) as here:
            try:
                case.function(here)
            except BaseException:
                text = f"{traceback.format_exc()}\n{here.log_tails()}"
                raise
    except KeyboardInterrupt:
        raise
    except Exception:
        text = text or traceback.format_exc()
    seconds = time.monotonic() - began
    print(f"{'FAILED' if text else 'ok'} {case.name} {seconds:.1f} s, seed {seed}", flush=True)
    if text:
        print(text, flush=True)
        print(f"again: tools/e2e -k {case.name} --seed {seed} --keep", flush=True)
    return {
        "name": case.name,
        "result": "FAIL" if text else "OK",
        "duration": seconds,
        "stdout": text,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="tools/e2e --help says more")
    parser.add_argument("-k", dest="names", action="append", default=[])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--build", default=str(ROOT / "build"))
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31))
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--log", help="where to write a line of JSON a case")
    return parser.parse_args()


def cpu_seconds() -> float:
    """Of this process and all that it waited for: what a run costs on a busy machine, too."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def end_with_status(*_: object) -> None:
    """On SIGTERM: an exception, so that engines, daemons and files go as they do otherwise."""
    sys.exit(128 + signal.SIGTERM)


def main() -> int:
    options = parse()
    chosen = [
        case for case in CASES
        if not options.names or any(name in case.name for name in options.names)
    ]  # fmt: skip
    if options.list:
        print("\n".join(case.name for case in chosen))
        return 0
    if not chosen:
        print(f"no case has {' or '.join(options.names)} in its name: tools/e2e --list")
        return 2
    if not os.access(os.path.join(options.build, "daemon", "kvtierd"), os.X_OK):
        print(f"{options.build} has no daemon/kvtierd: ninja -C {options.build}")
        return 2
    signal.signal(signal.SIGTERM, end_with_status)
    began = time.monotonic()
    shm.make_private()
    engine.prepare_parent()
    print(f"vLLM is imported, {time.monotonic() - began:.1f} s", flush=True)
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="kvtier-e2e-"))
    bench = Bench(os.path.abspath(options.build), scratch)
    try:
        results = [run_case(bench, case, options.seed) for case in chosen]
    finally:
        bench.close()
        if options.keep:
            print(f"kept: {scratch}")
        else:
            shutil.rmtree(scratch, ignore_errors=True)
    if options.log:
        lines = "".join(json.dumps(result) + "\n" for result in results)
        pathlib.Path(options.log).write_text(lines)
    failed = sum(result["result"] != "OK" for result in results)
    print(f"{time.monotonic() - began:.0f} s, {cpu_seconds():.0f} s of CPU")
    print(f"{len(results) - failed} passed, {failed} failed, 0 skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
