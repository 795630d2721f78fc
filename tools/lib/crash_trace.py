"""tools/crash --trace: the first requests of a trace twice over, by one daemon that nobody disturbs
and by one that is killed twice in the middle. L3 holds 5 % of the distinct blocks (few requests
need more: of the first hundreds, one prompt would fill it), L1 and L2 far less. Both runs are made
of the same segments of requests; what the segments behind a restart hit is compared with what they
hit undisturbed.

A kill in the middle takes with it what L1 and L2 alone had, and what is asked until the daemon is
back is not stored. Of a run that --limit makes short this is too much to judge by. Its daemon is
killed once more, between two segments, when all was written to L3; the segment behind that has to
hit what it hits undisturbed, but for what chance evicts (of 300 requests with an L3 of 40 % both
hit 88.3 %, and 42.1 % when the files of L3 are removed at that kill)."""
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
DRAINED = 1  # a short run's daemon is killed behind it, too, when all of it is in L3
SHARE_OF_UNDISTURBED_MIN = 0.95  # of the segments from a restart to the next kill
LOOK_SECONDS = 0.005  # between two looks at how far a segment is
LOAD_SECONDS_MAX = 60  # until the index of L3 was read
TRY_REQUESTS = 60  # to see how fast this machine is
MODEL = ("--block-tokens", str(BLOCK_TOKENS), "--bytes-per-token", str(BYTES_PER_TOKEN),
         "--layers", "1")


class Runs:
    def __init__(self, options, say):
        self.options, self.say = options, say
        self.is_short = options.limit is not None

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

    def segment(self, daemon, first, end, is_killed):
        """Requests [first, end); their numbers. When half of them were looked up the daemon is
        killed, if it is to be. By the clock, it might be gone before the bench came to it."""
        bench = subprocess.Popen(
            [bench_program(self.options.build), "replay", "--trace", self.options.trace,
             "--socket", daemon.socket, "--limit", str(end), *MODEL,
             *(["--skip", str(first)] if first else []), "--quiet", "--json"],
            stdout=subprocess.PIPE)
        if is_killed:
            half = lookups_of(daemon) + (end - first + 1) // 2
            while bench.poll() is None and lookups_of(daemon) < half:
                time.sleep(LOOK_SECONDS)
            daemon.kill()
            daemon.start()
        out = bench.communicate()[0]
        daemon.check_alive()
        if not out.strip():
            raise Broken(f"kvtier-bench failed with status {bench.returncode}")
        return json.loads(out)

    def run(self, limit, facts, killed):
        """A result for each segment. In the middle of those of @killed the daemon dies."""
        results = []
        with self.daemon(facts) as daemon:
            for number in range(SEGMENTS):
                is_killed = number in killed
                began = time.monotonic()
                results.append(self.segment(daemon, limit * number // SEGMENTS,
                                            limit * (number + 1) // SEGMENTS, is_killed))
                if killed and number == DRAINED and self.is_short:
                    daemon.ctl("drain")
                    daemon.kill()
                    daemon.start()
                    wait_loaded(daemon)
                self.say(f"segment {number + 1} of {SEGMENTS}: "
                         f"{100 * share_of(results[-1:]):.2f} % hit, "
                         f"{time.monotonic() - began:.1f} s"
                         f"{', killed in the middle' if is_killed else ''}")
        return results

    def choose_limit(self):
        """As many requests as two runs of them fit into the budget."""
        facts = self.info(TRY_REQUESTS)
        with self.daemon(facts) as daemon:
            began = time.monotonic()
            self.segment(daemon, 0, TRY_REQUESTS, False)
            rate = facts["prompt_blocks"] / (time.monotonic() - began)
        blocks_max = rate * self.options.seconds / 2.2
        limit = TRY_REQUESTS
        while True:
            more = self.info(limit * 5 // 4)
            if more["prompt_blocks"] > blocks_max or more["requests"] < limit * 5 // 4:
                return limit
            limit = limit * 5 // 4


def lookups_of(daemon):
    return next(counter["value"] for counter in daemon.stats()["counters"]
                if counter["name"] == "lookups")


def wait_loaded(daemon):
    """The daemon serves before it has read the index of L3; until it has, there are misses."""
    until = time.monotonic() + LOAD_SECONDS_MAX
    while any(device["index"]["state"] != "ready" for device in daemon.stats()["devices"]):
        if time.monotonic() > until:
            raise Broken(f"the index was not read in {LOAD_SECONDS_MAX} s:\n{daemon.log_tail()}")
        time.sleep(LOOK_SECONDS)


def share_of(results):
    return sum(result["hit_tokens"] for result in results) / \
        max(sum(result["lookup_tokens"] for result in results), 1)


def compare_spans(options, quiet, killed, spans, say):
    """Faults. @spans gets the shares that were hit from each restart to the next kill."""
    faults = []
    is_short = options.limit is not None
    parts = [(0, KILLED[0]), (KILLED[0] + 1, KILLED[1]), (KILLED[1] + 1, SEGMENTS)]
    if is_short:
        parts.insert(0, (DRAINED + 1, DRAINED + 2))
    for number, (first, end) in enumerate(parts):
        shares = [share_of(results[first:end]) for results in (quiet, killed)]
        spans.append({"segments": [first, end], "undisturbed_hit_share": shares[0],
                      "killed_hit_share": shares[1]})
        name = f"segment {end}" if end == first + 1 else f"segments {first + 1} to {end}"
        say(f"{name}: {100 * shares[0]:.2f} % hit undisturbed, {100 * shares[1]:.2f} % when "
            f"killed before")
        is_judged = not options.only_bytes and (number == 0 or not is_short)
        if is_judged and shares[1] < shares[0] * SHARE_OF_UNDISTURBED_MIN:
            faults.append(f"{name} hit {100 * shares[1]:.2f} %, not {100 * shares[0]:.2f} %")
    return faults


def run_trace(options, say):
    """The numbers of both runs, and what is wrong with them."""
    runs = Runs(options, say)
    limit = options.limit or runs.choose_limit()
    facts = runs.info(limit)
    say(f"{limit:,} requests of the trace, {facts['distinct_blocks']:,} distinct blocks")
    say("undisturbed")
    quiet = runs.run(limit, facts, ())
    say("killed twice")
    killed = runs.run(limit, facts, KILLED)
    result = {"requests": limit, "distinct_blocks": facts["distinct_blocks"], "faults": [],
              "verified_blocks": 0, "wrong_bytes": 0, "spans": []}
    for one in (*quiet, *killed):
        result["verified_blocks"] += one["verified_blocks"]
        result["wrong_bytes"] += one["wrong_bytes"]
        for name in ("leases_left", "reservations_left", "pins_left"):
            if one[name] != 0:
                result["faults"].append(f"{one[name]} {name.replace('_', ' ')}")
    if result["wrong_bytes"]:
        result["faults"].append(f"{result['wrong_bytes']} wrong bytes")
    result["faults"] += compare_spans(options, quiet, killed, result["spans"], say)
    return result
