"""tools/crash --trace: the first requests of a trace twice over, by one daemon that nobody disturbs
and by one that is killed twice in the middle. L3 holds 5 % of the distinct blocks (few requests
need more: of the first hundreds, one prompt would fill it), L1 and L2 far less. Both runs are made
of the same segments of requests; what the segments behind a restart hit is compared with what they
hit undisturbed."""
import json
import subprocess
import time

from scratch import Broken, ScratchDaemon, bench_info, bench_program

MIB = 1 << 20
BLOCK_TOKENS = 512
# 512 bytes of header, 2,048 of tokens and the payload make 32 KiB.
BYTES_PER_TOKEN = 58
SLOT_BYTES = 32 << 10
L1, L2 = 1 * MIB, 4 * MIB
INDEX = 8 * MIB
SEGMENTS = 12
KILLED = (3, 7)  # segments in whose middle the daemon is killed
SHARE_OF_UNDISTURBED_MIN = 0.95
TRY_REQUESTS = 60  # to see how fast this machine is
MODEL = ("--block-tokens", str(BLOCK_TOKENS), "--bytes-per-token", str(BYTES_PER_TOKEN),
         "--layers", "1")


class Runs:
    def __init__(self, options, say):
        self.options, self.say = options, say

    def info(self, limit):
        return bench_info(self.options.build, ["--trace", self.options.trace, "--limit",
                                               str(limit), *MODEL])

    def daemon(self, facts):
        l3 = max(facts["distinct_blocks"] * SLOT_BYTES * self.options.l3_pct // 100, 4 * MIB)
        return ScratchDaemon(self.options.build, L1, L2, l3 // (2 * MIB) * 2 * MIB + INDEX,
                             self.options.scratch,
                             settings=[f"tiers.l3.index_bytes={INDEX}B",
                                       "tiers.l2.slab_unit=1MiB",
                                       "limits.leased_bytes_per_engine=1GiB"])

    def segment(self, daemon, first, end, kill_after):
        """Requests [first, end); their numbers. The daemon dies after @kill_after seconds."""
        bench = subprocess.Popen(
            [bench_program(self.options.build), "replay", "--trace", self.options.trace,
             "--socket", daemon.socket, "--limit", str(end), *MODEL,
             *(["--skip", str(first)] if first else []), "--quiet", "--json"],
            stdout=subprocess.PIPE)
        if kill_after is not None:
            time.sleep(kill_after)
            daemon.kill()
            daemon.start()
        out = bench.communicate()[0]
        daemon.check_alive()
        if not out.strip():
            raise Broken(f"kvtier-bench failed with status {bench.returncode}")
        return json.loads(out)

    def run(self, limit, facts, undisturbed):
        """A result for each segment, and seconds."""
        results, seconds = [], []
        with self.daemon(facts) as daemon:
            for number in range(SEGMENTS):
                kill_after = None
                if undisturbed is not None and number in KILLED:
                    kill_after = 0.5 * undisturbed[1][number]
                began = time.monotonic()
                results.append(self.segment(daemon, limit * number // SEGMENTS,
                                            limit * (number + 1) // SEGMENTS, kill_after))
                seconds.append(time.monotonic() - began)
                self.say(f"segment {number + 1} of {SEGMENTS}: "
                         f"{100 * share_of(results[-1:]):.2f} % hit, {seconds[-1]:.1f} s"
                         f"{', killed in the middle' if kill_after is not None else ''}")
        return results, seconds

    def choose_limit(self):
        """As many requests as two runs of them fit into the budget."""
        facts = self.info(TRY_REQUESTS)
        with self.daemon(facts) as daemon:
            began = time.monotonic()
            self.segment(daemon, 0, TRY_REQUESTS, None)
            rate = facts["prompt_blocks"] / (time.monotonic() - began)
        blocks_max = rate * self.options.seconds / 2.2
        limit = TRY_REQUESTS
        while True:
            more = self.info(limit * 5 // 4)
            if more["prompt_blocks"] > blocks_max or more["requests"] < limit * 5 // 4:
                return limit
            limit = limit * 5 // 4


def share_of(results):
    return sum(result["hit_tokens"] for result in results) / \
        max(sum(result["lookup_tokens"] for result in results), 1)


def run_trace(options, say):
    """The numbers of both runs, and what is wrong with them."""
    runs = Runs(options, say)
    limit = options.limit or runs.choose_limit()
    facts = runs.info(limit)
    say(f"{limit:,} requests of the trace, {facts['distinct_blocks']:,} distinct blocks")
    say("undisturbed")
    quiet = runs.run(limit, facts, None)
    say("killed twice")
    killed = runs.run(limit, facts, quiet)
    result = {"requests": limit, "distinct_blocks": facts["distinct_blocks"], "faults": [],
              "verified_blocks": 0, "wrong_bytes": 0, "spans": []}
    for one in (*quiet[0], *killed[0]):
        result["verified_blocks"] += one["verified_blocks"]
        result["wrong_bytes"] += one["wrong_bytes"]
        for name in ("leases_left", "reservations_left", "pins_left"):
            if one[name] != 0:
                result["faults"].append(f"{one[name]} {name.replace('_', ' ')}")
    if result["wrong_bytes"]:
        result["faults"].append(f"{result['wrong_bytes']} wrong bytes")
    for first, end in ((0, KILLED[0]), (KILLED[0] + 1, KILLED[1]), (KILLED[1] + 1, SEGMENTS)):
        shares = [share_of(run[0][first:end]) for run in (quiet, killed)]
        result["spans"].append({"segments": [first, end], "undisturbed_hit_share": shares[0],
                                "killed_hit_share": shares[1]})
        say(f"segments {first + 1} to {end}: {100 * shares[0]:.2f} % hit undisturbed, "
            f"{100 * shares[1]:.2f} % when killed before")
        if shares[1] < shares[0] * SHARE_OF_UNDISTURBED_MIN and not options.only_bytes:
            result["faults"].append(f"segments {first + 1} to {end} hit {100 * shares[1]:.2f} %, "
                                    f"not {100 * shares[0]:.2f} %")
    return result
