"""Engines with several ranks, bounded pools and preemption (kvtier-bench --paged) against a real
kvtierd with small tiers: what vLLM does to it slowly, at speed.

    paged_program.py SOURCE_ROOT BUILD [--reduced] [--seed N] [unittest arguments]

Runs are made from a seed, which is printed; timing is the machine's."""
import json
import os
import random
import sys
import time
import unittest

ROOT = BUILD = ""
IS_REDUCED = False
SEED = 0
LEFT_WAIT_SECONDS = 20
MIB = 1 << 20
FAULTS = ["--abort-every", "5", "--cancel-every", "7", "--late-us", "1000"]


class Paged(unittest.TestCase):
    def setUp(self):
        self.daemon = None
        self.seed = SEED

    def start(self, l1=4 * MIB, l2=16 * MIB, l3=64 * MIB, settings=()):
        self.daemon = scratch.ScratchDaemon(BUILD, l1, l2, l3,
                                            settings=["stop.drain=false", *settings])
        self.daemon.__enter__()
        self.addCleanup(self.daemon.clean_up)

    def arguments(self, command, *more):
        limit = 60 if IS_REDUCED else 240
        return [command, "--paged", "--socket", self.daemon.socket, "--seed", str(self.seed),
                "--namespace", self.id(), "--limit", str(limit), "--concurrency", "6", "--layers",
                "2", "--bytes-per-token", "96", "--window", "300", "--state-bytes", "1600",
                "--store-output", "--deadline", "60000", "--quiet", *more]

    def check(self, status, result, requests=None):
        """What has to hold, whatever went wrong in the engines."""
        self.assertEqual(result["wrong_bytes"], 0, result)
        self.assertEqual(result["stray_bytes"], 0, result)
        self.assertEqual(status, 0)
        self.assertEqual(result["requests"], requests or (60 if IS_REDUCED else 240))
        if result["engine_restarts"] == 0:  # nobody quiesces what a dead daemon had begun
            self.assertEqual(result["engine_blocks_lost"], 0)
        self.daemon.check_alive()
        until = time.monotonic() + LEFT_WAIT_SECONDS
        while True:
            stats = self.daemon.stats()
            left = {name: stats[name] for name in ("leases", "tickets", "reserved_copies", "pins")}
            if not any(left.values()) or time.monotonic() > until:
                break
            time.sleep(0.05)
        self.assertEqual(set(left.values()), {0}, left)

    def run_bench(self, *more):
        status, result = scratch.bench_run(BUILD, self.arguments("synth", *more))
        self.check(status, result)
        return result

    def check_whole(self, result):
        """Nobody gave anything up: what a lease covers came, on every rank."""
        self.assertEqual(result["failed_loads"], 0)
        self.assertEqual(result["recomputed_blocks"], 0)
        self.assertEqual(result["part_stores"], 0)
        self.assertEqual(result["errors"], [])

    def test_nothing_goes_wrong(self):
        self.start()
        result = self.run_bench("--ranks", "3", "--preset", "hybrid", "--sessions", "12")
        self.check_whole(result)
        self.assertGreater(result["loads"], 20)
        self.assertGreater(result["reused_by_other"], 0)
        self.assertGreater(result["slid_blocks"], 0)
        self.assertGreater(result["left_alone"], 0)

    def test_a_pool_that_is_far_too_small(self):
        self.start()
        # The longest of these requests takes 1.3 MiB.
        result = self.run_bench("--ranks", "2", "--preset", "window", "--pool-bytes", "1536KiB",
                                "--concurrency", "12", "--sessions", "24", *FAULTS)
        self.assertGreater(result["preemptions"], 0 if IS_REDUCED else 10)

    def test_ranks_that_give_up_and_requests_that_abort(self):
        self.start(l2=8 * MIB)
        given_up = aborted = 0
        for preset in ("full", "window", "state", "hybrid", "mla"):
            with self.subTest(preset=preset):
                result = self.run_bench("--ranks", "4", "--preset", preset, "--tenants", "2",
                                        *FAULTS)
                self.assertEqual(result["promote_results"]["miss"], 0)
                given_up += result["part_stores"]
                aborted += result["aborted_loads"]
        self.assertGreater(given_up, 0)
        self.assertGreater(aborted, 0)

    def test_engines_and_ranks_that_are_killed(self):
        self.start()
        result = self.run_bench("--ranks", "2", "--preset", "hybrid", "--engines", "2",
                                "--kill-engine-every", "25", "--kill-rank-every", "12", *FAULTS)
        self.assertGreater(result["engine_kills"] + result["rank_kills"], 1)

    def test_without_l1(self):
        self.start(l1=0)
        self.check_whole(self.run_bench("--ranks", "2", "--preset", "window"))

    def test_two_models_at_a_time(self):
        self.start()
        benches = [scratch.bench_start(BUILD, self.arguments(
            "synth", "--ranks", str(ranks), "--preset", preset, *FAULTS))
            for ranks, preset in ((1, "window"), (2, "hybrid"))]
        for status, result in [scratch.bench_finish(bench) for bench in benches]:
            self.check(status, result)

    def test_a_daemon_that_dies(self):
        self.start()
        bench = scratch.bench_start(BUILD, self.arguments(
            "synth", "--ranks", "2", "--preset", "window", "--engines", "2", "--time-scale",
            "1" if IS_REDUCED else "0.25", *FAULTS))
        kills = 0
        while kills < 3 and self.wait_for_blocks(bench):
            self.daemon.kill()
            self.daemon.start()
            kills += 1
        status, result = scratch.bench_finish(bench)
        self.check(status, result)
        self.assertGreater(kills, 0)
        self.assertGreaterEqual(result["engine_restarts"], kills)

    def wait_for_blocks(self, bench):
        """Until engines store: they are in the middle of it then. False: they have ended."""
        before, until = self.daemon.stats(), time.monotonic() + 30
        while time.monotonic() < until:
            if bench.poll() is not None:
                return False
            now = self.daemon.stats()
            stored = [sum(engine["demoted_bytes"] for engine in stats["engines"])
                      for stats in (before, now)]
            if stored[1] > stored[0]:
                return True
            time.sleep(0.02)
        return self.fail(f"nothing was stored: {now['engines']}")

    def test_a_trace(self):
        self.start()
        path = os.path.join(self.daemon.directory, "trace.jsonl")
        count = self.write_trace(path)
        arguments = self.arguments("replay", "--trace", path, "--ranks", "2", "--preset", "window",
                                   "--limit", str(count), "--time-scale", "0.1")
        status, result = scratch.bench_run(BUILD, arguments)
        self.check(status, result, count)
        self.check_whole(result)
        self.assertGreater(result["hit_tokens"], 0)

    def write_trace(self, path):
        """Conversations whose prompts grow, and answers; how many requests."""
        dice = random.Random(self.seed)
        histories = [[1000 * i] for i in range(6)]
        lines = []
        for number in range(40):
            session = dice.randrange(len(histories))
            histories[session].append(1 + number)
            ids = histories[session]
            lines.append({"timestamp": 10 * number, "session": f"s{session}",
                          "input_length": 512 * len(ids) - dice.randrange(100),
                          "output_length": dice.randrange(200), "hash_ids": list(ids)})
        with open(path, "w", encoding="utf-8") as trace:
            for line in lines:
                trace.write(json.dumps(line) + "\n")
        return len(lines)


def main():
    global ROOT, BUILD, IS_REDUCED, SEED, scratch
    ROOT, BUILD = sys.argv[1:3]
    rest = sys.argv[3:]
    if "--reduced" in rest:
        rest.remove("--reduced")
        IS_REDUCED = True
    SEED = int.from_bytes(os.urandom(3), "little")
    if "--seed" in rest:
        at = rest.index("--seed")
        SEED = int(rest[at + 1])
        del rest[at:at + 2]
    print(f"seed {SEED}", flush=True)
    sys.path.insert(0, os.path.join(ROOT, "tools", "lib"))
    import scratch  # noqa: E402 (its place is known only now)
    unittest.main(argv=[sys.argv[0], *rest])


if __name__ == "__main__":
    main()
