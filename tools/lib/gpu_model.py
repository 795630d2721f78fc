"""The random model of the device tier on a GPU: a part of tools/gpu-check. The program is a test's
(tests/device/gpu_model_real.c): pools, slots and L2 under random transfers, and a naive model of
what has to be where, which looks after each. The result is a row like those of kvtier-gpu-check."""
import re
import subprocess

PART = "model"
NAME = "random transfers, a naive model"
SEEDS_MAX = 1000000  # the time ends it
GRACE_SECONDS = 60  # a program that is this late hangs
SUMS = re.compile(r"seeds from \d+: (?P<seeds>\d+), transfers: \d+, done: (?P<done>\d+), late: \d+")


def row_of(seed, status, out, errors):
    row = {"part": PART, "name": NAME, "verdict": "FAILED",
           "text": f"seed {seed}: ended with status {status}"}
    sums = SUMS.search(out)
    if status == 0 and sums:
        row.update(verdict="ok", cases=int(sums["done"]), wrong_bytes=0,
                   text=f"seed {seed}, {sums['seeds']} worlds")
    else:  # the first difference ends it, and is its last line
        lines = [line for line in (out + errors).splitlines() if line.strip()]
        row["text"] += f": {lines[-1][:160]}" if lines else ""
    return row


def run_model(program, device, seed, seconds):
    """A row."""
    command = [program, str(seed), str(SEEDS_MAX), str(max(1, int(seconds))), str(device)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False,
                              timeout=seconds + GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        return {"part": PART, "name": NAME, "verdict": "FAILED",
                "text": f"seed {seed}: did not end in {seconds + GRACE_SECONDS:.0f} s"}
    return row_of(seed, done.returncode, done.stdout.decode(errors="replace"),
                  done.stderr.decode(errors="replace"))
