"""A daemon with L1 in GPU memory under engines whose pools are GPU memory, too: a part of
tools/gpu-check. Every byte is verified, engines and ranks are killed; with a trace its first
requests are replayed, too. The result is rows like those of kvtier-gpu-check."""
import json
import subprocess
import time

from scratch import Broken, ScratchDaemon

MIB = 1 << 20
PART = "replay"
SECONDS_MIN = 5  # a run is not begun with less
SECONDS_HUNG = 120  # a run that takes longer hangs
END_SECONDS = 10
BACK_SECONDS = 30  # a lost GPU is in service again by then

# Name, arguments of kvtier-bench.
RUNS = (
    ("one engine", ["--preset", "window", "--concurrency", "4"]),
    ("quantised to FP8", ["--preset", "window", "--quantise", "fp8_e4m3"]),
    ("paged engines of two ranks, killed", [
        "--paged", "--preset", "hybrid", "--ranks", "2", "--concurrency", "4", "--store-output",
        "--engines", "2", "--kill-engine-every", "40", "--kill-rank-every", "30",
        "--abort-every", "7", "--cancel-every", "9"]),
)


# Blocks of a trace are of 512 tokens. In 100 requests of the agents' trace there are 1,487 distinct
# blocks, asked for 11,120 times: L1 holds most of them, and the tiers below it are used.
TRACE_LIMIT = 100
TRACE_MODEL = ("--block-tokens", "512", "--layers", "1", "--concurrency", "4")
TRACE_BYTES_PER_TOKEN = 58  # small: with its header a block is 32 KiB
TRACE_L1, TRACE_L2, TRACE_L3 = 32 * MIB, 32 * MIB, 128 * MIB


class Sizes:
    """Of tiers and models: large enough for a GPU to have something to do, or small."""

    def __init__(self, is_small):
        self.l1 = (8 if is_small else 512) * MIB
        self.l2 = (16 if is_small else 512) * MIB
        self.l3 = (64 if is_small else 1024) * MIB
        self.staging = (2 if is_small else 64) * MIB
        self.headroom = (1 if is_small else 256) * MIB
        self.limit = 60 if is_small else 200
        self.layers = 2 if is_small else 16
        self.bytes_per_token = 96 if is_small else 4096


class TraceSizes(Sizes):
    def __init__(self, is_small):
        super().__init__(is_small)
        self.bytes_per_token = TRACE_BYTES_PER_TOKEN if is_small else 512
        if is_small:
            self.l1, self.l2, self.l3 = TRACE_L1, TRACE_L2, TRACE_L3


def start_daemon(programs, sizes, device):
    daemon = ScratchDaemon(programs.build, 0, sizes.l2, sizes.l3, settings=[
        "stop.drain=false", "tiers.l1.backend=cuda", f"tiers.l1.gpus={device}",
        f"tiers.l1.bytes={sizes.l1}B", f"tiers.l1.staging={sizes.staging}B",
        f"tiers.l1.headroom={sizes.headroom}B"])
    daemon.program = programs.daemon
    return daemon


def arguments_of(daemon, sizes, device, name, more):
    return ["synth", "--socket", daemon.socket, "--memory", "cuda", "--gpu", str(device),
            "--namespace", name, "--limit", str(sizes.limit), "--layers", str(sizes.layers),
            "--bytes-per-token", str(sizes.bytes_per_token), "--window", "300", "--state-bytes",
            "1600", "--deadline", "60000", "--quiet", *more]


def trace_arguments(daemon, trace, bytes_per_token):
    return ["replay", "--trace", trace, "--socket", daemon.socket, "--limit", str(TRACE_LIMIT),
            "--namespace", "trace", "--bytes-per-token", str(bytes_per_token), "--deadline",
            "60000", "--quiet", *TRACE_MODEL]


def row_of(name, status, result):
    wrong = result["wrong_bytes"] + result.get("stray_bytes", 0)
    row = {"part": PART, "name": name, "cases": result["verified_blocks"], "wrong_bytes": wrong,
           "verdict": "ok"}
    hits = result["hit_tokens_by_tier"]
    left = sum(result[what] for what in ("leases_left", "reservations_left", "pins_left"))
    row["text"] = "tokens hit: " + ", ".join(f"{tier} {hits[tier]}" for tier in hits)
    if wrong > 0:
        row["verdict"] = "WRONG BYTES"
    elif status != 0:
        row["verdict"] = "FAILED"
        row["text"] = f"kvtier-bench ended with status {status}"
    elif left > 0:
        row["verdict"] = "FAILED"
        row["text"] = f"{left} leases, reservations or pins left"
    elif row["cases"] == 0 or hits["L1"] == 0:
        row["verdict"] = "FAILED"
        row["text"] = "nothing came from L1: nothing was tried"
    return row


def failed(name, text):
    return {"part": PART, "name": name, "verdict": "FAILED", "text": text}


def run_one(programs, name, arguments):
    bench = subprocess.Popen([programs.bench, *arguments, "--json"], stdout=subprocess.PIPE)
    try:
        out = bench.communicate(timeout=SECONDS_HUNG)[0]
    except subprocess.TimeoutExpired:
        end_bench(bench)
        return failed(name, f"not done in {SECONDS_HUNG} s")
    if not out.strip():
        return failed(name, f"kvtier-bench ended with status {bench.returncode}")
    return row_of(name, bench.returncode, json.loads(out))


def end_bench(bench):
    bench.terminate()  # it ends its engines
    try:
        bench.communicate(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        bench.kill()
        bench.communicate()


def check_gpu(daemon):
    """A row of the GPU after all of it."""
    until = time.monotonic() + BACK_SECONDS
    while True:
        gpus = daemon.stats()["gpus"]
        if not gpus or gpus[0]["state"] == "ok" or time.monotonic() > until:
            break
        time.sleep(0.2)
    row = {"part": PART, "name": "the GPU afterwards", "verdict": "ok", "cases": 1,
           "wrong_bytes": 0}
    if not gpus or gpus[0]["state"] != "ok":
        return failed(row["name"], gpus[0]["why"] if gpus else "the daemon has no GPU")
    row["text"] = (f"losses {gpus[0]['losses']}, bad checks {gpus[0]['bad_checks']}, "
                   f"launches {gpus[0]['launches']}")
    if gpus[0]["bad_checks"] > 0:
        row["verdict"] = "FAILED"
    return row


def replay_trace(programs, device, is_small, trace):
    sizes = TraceSizes(is_small)
    with start_daemon(programs, sizes, device) as daemon:
        arguments = trace_arguments(daemon, trace, sizes.bytes_per_token)
        row = run_one(programs, f"a trace, {TRACE_LIMIT} requests",
                      [*arguments, "--memory", "cuda", "--gpu", str(device)])
        daemon.check_alive()
    return row


def replay(programs, device, is_small, seconds, trace=None):
    """Rows. @programs: build, daemon, bench. @trace: a file of requests. None is begun after
    @seconds but the first and that of the trace; those that are begun come to an end."""
    end = time.monotonic() + seconds
    sizes = Sizes(is_small)
    rows = []
    try:
        with start_daemon(programs, sizes, device) as daemon:
            for name, more in RUNS:
                # The first is tried in any case: without one nothing is said about L1.
                if rows and end - time.monotonic() < SECONDS_MIN:
                    rows.append({"part": PART, "name": name, "verdict": "",
                                 "text": "no time left for it"})
                    continue
                arguments = arguments_of(daemon, sizes, device, name, more)
                rows.append(run_one(programs, name, arguments))
                daemon.check_alive()
            rows.append(check_gpu(daemon))
        if trace is not None:
            rows.append(replay_trace(programs, device, is_small, trace))
    except Broken as broken:
        rows.append(failed("the daemon", str(broken)))
    return rows
