"""The main job of tools/quickstart: a daemon with three small tiers, agents whose context does not
fit into the upper two, every byte verified, and the daemon's own counters beside it. Then the
daemon is stopped and started again, and the last conversations go on from what L3 kept."""
import os
import sys
import time

sys.dont_write_bytecode = True
from scratch import ROOT, Broken, ScratchDaemon, bench_program, bench_run, run_script  # noqa: E402

BUILD = os.path.join(ROOT, "build")
L1, L2, L3 = 32 << 20, 96 << 20, 512 << 20
TIERS = ("L1", "L2", "L3")
REQUESTS, REQUESTS_AGAIN = 1500, 60
LOAD = ["synth", "--limit", str(REQUESTS), "--sessions", "48", "--bytes-per-token", "1024",
        "--engines", "2", "--store-output"]


def say(text):
    print(f"\n>>> {text}", flush=True)


def hits_of_daemon(stats):
    """Hit tokens by tier, from `kvtier-ctl stats --json`."""
    return {f"L{tier['tier']}": tier["hit_tokens"] for tier in stats["tiers"]}


def check_agreement(bench, stats):
    seen = {tier: hits_of_daemon(stats).get(tier, 0) for tier in TIERS}
    problems = []
    if bench["wrong_bytes"] != 0:
        problems.append(f"{bench['wrong_bytes']} wrong bytes")
    for tier in TIERS:
        if bench["hit_tokens_by_tier"][tier] == 0:
            problems.append(f"no hits in {tier}")
        if bench["hit_tokens_by_tier"][tier] != seen[tier]:
            problems.append(f"{tier}: the bench counted {bench['hit_tokens_by_tier'][tier]} hit "
                            f"tokens, the daemon {seen[tier]}")
    if problems:
        raise Broken("; ".join(problems))


def print_hits(bench):
    share = 100 * bench["hit_tokens"] / bench["lookup_tokens"]
    print(f"Of {bench['lookup_tokens']:,} prompt tokens, {bench['hit_tokens']:,} ({share:.1f} %) "
          "came from the cache:")
    for tier, where in zip(TIERS, ("L1, here host memory in the place of a GPU's",
                                   "L2, host memory", "L3, the disk")):
        print(f"  {bench['hit_tokens_by_tier'][tier]:>12,}  from {where}")
    print(f"{bench['verified_blocks']:,} blocks verified byte by byte, {bench['wrong_bytes']} "
          "bytes wrong.")


def restart(daemon):
    """Seconds from the start of the new daemon until it serves."""
    daemon.stop()
    began = time.monotonic()
    daemon.start()
    return time.monotonic() - began


def show_restart(daemon):
    """The last requests once more: what they hit now was stored before the restart."""
    say("Stopping the daemon (SIGTERM: it writes to L3 what only memory had) and starting it "
        "again\n    on the same file.")
    seconds = restart(daemon)
    say(f"It served after {1000 * seconds:.0f} ms. The last {REQUESTS_AGAIN} requests once more: "
        "L1 and L2 are empty now,\n    what L3 gives came from before the restart.")
    status, bench = bench_run(BUILD, [*LOAD, "--socket", daemon.socket, "--skip",
                                      str(REQUESTS - REQUESTS_AGAIN)])
    daemon.check_alive()
    if status != 0:
        raise Broken(f"kvtier-bench ended with status {status}: {bench['wrong_bytes']} bytes "
                     "were wrong")
    if bench["hit_tokens_by_tier"]["L3"] == 0:
        raise Broken("nothing came from before the restart")
    print_hits(bench)


def main():
    say("Starting a daemon with 32 MiB of L1, 96 MiB of L2 and 512 MiB of L3 on this disk, in a "
        "scratch directory.")
    with ScratchDaemon(BUILD, L1, L2, L3) as daemon:
        say("Agents talk to two engines in turns; each turn's prompt is the whole conversation so "
            "far.\n    What was computed before should come from the cache. kvtier-bench "
            f"{' '.join(LOAD)}")
        status, bench = bench_run(BUILD, [*LOAD, "--socket", daemon.socket, "--report"])
        daemon.check_alive()
        if status != 0:
            raise Broken(f"kvtier-bench ended with status {status}: {bench['wrong_bytes']} bytes "
                         "were wrong")
        say("The daemon's side of it: kvtier-ctl stats")
        print(daemon.ctl("stats"))
        check_agreement(bench, daemon.stats())
        say("Result")
        print_hits(bench)
        print("The daemon's own counters say the same.")
        show_restart(daemon)
        say("Stopping the daemon and removing the scratch directory.")
    print(f"""
Where to go next
  {os.path.relpath(bench_program(BUILD))} --help      other models, loads and traces
  build/daemon/kvtierd --print-config             every setting and its default
  deploy/kvtierd.yaml, deploy/kvtierd.service     run it as a service
  docs/architecture.md                            how it works
  tools/test                                      all tests
""")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
