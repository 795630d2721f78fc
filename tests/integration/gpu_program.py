"""The whole daemon with L1 on GPUs, which are a fake: ordinary memory behind an asynchronous CUDA
runtime that reorders, fails and loses its contexts as a seed says (kvtierd-fake-cuda).

    gpu_program.py SOURCE_ROOT BUILD KVTIERD [--reduced] [--seed N] [unittest arguments]

Engines are kvtier-bench's, which verify every byte. When the daemon stops, the fake ends it if
anything was left open. The seed is printed."""
import json
import os
import subprocess
import sys
import time
import unittest

ROOT = BUILD = PROGRAM = ""
IS_REDUCED = False
SEED = 0
MIB = 1 << 20
SKIPPED = 77
LOADS_MAX = 20
HUNG_SECONDS = 90  # what has not come by then does not come
FAULTS = ["--abort-every", "5", "--cancel-every", "7", "--late-us", "1000"]


class Daemon(unittest.TestCase):
    model = 1  # of the loads: another one finds nothing of those before

    def start(self, fake, l1="8MiB", l2=16 * MIB, l3=64 * MIB, settings=()):
        daemon = scratch.ScratchDaemon(BUILD, 0, l2, l3, settings=[
            "stop.drain=false", "tiers.l1.backend=cuda", f"tiers.l1.bytes={l1}",
            "tiers.l1.headroom=1MiB", "tiers.l1.staging=2MiB", "tiers.l1.retry_min=20ms",
            "tiers.l1.retry_max=200ms", *settings])
        daemon.program = PROGRAM
        daemon.environment["KVT_FAKE_CUDA"] = f"seed={SEED},{fake}"
        self.daemon = daemon
        daemon.__enter__()
        self.addCleanup(daemon.clean_up)

    def log_lines(self, word):
        with open(self.daemon.log_path, encoding="utf-8", errors="replace") as log:
            return [line.rstrip() for line in log if word in line]

    def arguments(self, *more, count=None):
        count = count or (60 if IS_REDUCED else 200)
        return ["synth", "--socket", self.daemon.socket, "--seed", str(SEED), "--namespace",
                f"{self.id()} {self.model}", "--limit", str(count),
                "--layers", "2", "--bytes-per-token", "96",
                "--window", "300", "--state-bytes", "1600", "--deadline", "60000", "--quiet",
                *more]

    def check(self, status, result):
        self.assertEqual(result["wrong_bytes"], 0, result)
        self.assertEqual(status, 0, result)
        self.daemon.check_alive()
        until = time.monotonic() + HUNG_SECONDS
        while True:
            stats = self.daemon.stats()
            left = {name: stats[name] for name in ("leases", "tickets", "reserved_copies", "pins")}
            if not any(left.values()) or time.monotonic() > until:
                break
            time.sleep(0.05)
        self.assertEqual(set(left.values()), {0}, left)

    def run_bench(self, *more, count=None):
        status, result = scratch.bench_run(BUILD, self.arguments(*more, count=count))
        self.check(status, result)
        return result

    def run_paged(self, *more):
        return self.run_bench("--paged", "--concurrency", "6", "--store-output", "--ranks", "2",
                              *more)

    def l1_hits(self, result):
        return result["hit_tokens_by_tier"]["L1"]


class NoGpu(Daemon):
    """What keeps a GPU from being used is one line, and the daemon serves without it."""

    def check_off(self, fake, *words, **more):
        with self.subTest(fake=fake):
            self.start(fake, **more)
            lines = self.log_lines("L1: off")
            self.assertEqual(len(lines), 1, lines)
            for word in words:
                self.assertIn(word, lines[0])
            result = self.run_bench("--preset", "window", "--store-output", count=20)
            self.assertEqual(self.l1_hits(result), 0)
            self.assertGreater(result["hit_tokens"], 0)
            self.daemon.stop()
            self.daemon.clean_up()

    def test_no_driver(self):
        self.check_off("no_driver=1", "driver")

    def test_an_old_driver(self):
        self.check_off("driver=12020", "12.2", "13.0")

    def test_no_device(self):
        self.check_off("devices=0", "no GPU")

    def test_busy_in_exclusive_mode(self):
        self.check_off("busy=1", "exclusive")

    def test_prohibited(self):
        self.check_off("prohibited=1", "GPU 0")

    def test_too_large(self):
        self.check_off("bytes=64MiB", "GPU 0", "free", l1="128MiB")


class Replay(Daemon):
    def test_one_gpu(self):
        self.start("devices=1")
        result = self.run_bench("--preset", "window", "--concurrency", "4")
        self.assertGreater(self.l1_hits(result), 0)
        self.daemon.stop()

    def test_quantised(self):
        for quantise in ("fp8_e4m3", "int8"):
            with self.subTest(quantise=quantise):
                self.start("devices=2")
                result = self.run_bench("--quantise", quantise, "--preset", "hybrid", "--ranks",
                                        "2", "--concurrency", "4", "--cancel-every", "9")
                self.assertGreater(self.l1_hits(result), 0)
                self.daemon.stop()

    def test_paged(self):
        self.start("devices=1")
        result = self.run_paged("--preset", "hybrid", *FAULTS)
        self.assertGreater(self.l1_hits(result), 0)
        self.daemon.stop()

    def test_two_gpus_and_engines_that_are_killed(self):
        self.start("devices=2")
        self.run_paged("--preset", "window", "--engines", "2", "--kill-engine-every", "25",
                       "--kill-rank-every", "12", *FAULTS)
        self.daemon.stop()

    def test_a_thread_that_does_the_work(self):
        self.start("devices=1,executor=1")
        result = self.run_paged("--preset", "window", *FAULTS)
        self.assertGreater(self.l1_hits(result), 0)
        self.daemon.stop()

    def test_host_backend(self):
        self.start("devices=1", settings=["tiers.l1.backend=host"])
        result = self.run_paged("--preset", "hybrid", *FAULTS)
        self.assertGreater(self.l1_hits(result), 0)
        self.daemon.stop()


class Trace(Daemon):
    """The first requests of the agents' trace."""

    def setUp(self):
        self.trace = scratch.find_trace()
        if self.trace is None:
            self.skipTest(f"no {scratch.AGENTS_TRACE}: set KVT_TRACES to the directory that has it")

    def replay(self, program, settings=(), more=()):
        self.start("devices=1", f"{gpu_replay.TRACE_L1}B", gpu_replay.TRACE_L2,
                   gpu_replay.TRACE_L3, settings)
        arguments = gpu_replay.trace_arguments(self.daemon, self.trace,
                                               gpu_replay.TRACE_BYTES_PER_TOKEN)
        bench = subprocess.Popen([program, *arguments, *more, "--json"], stdout=subprocess.PIPE)
        status, result = scratch.bench_finish(bench)
        self.check(status, result)
        self.assertEqual([result[f"{what}_left"] for what in ("leases", "reservations", "pins")],
                         [0, 0, 0])
        self.assertEqual(result["requests"], gpu_replay.TRACE_LIMIT)
        self.assertGreater(result["verified_blocks"], 1000)
        self.assertGreater(self.l1_hits(result) * 4, result["hit_tokens"])
        return self.daemon.stats()

    def test_host_backend(self):
        stats = self.replay(scratch.bench_program(BUILD), ["tiers.l1.backend=host"])
        self.assertEqual(stats["gpus"], [])
        l1 = stats["tiers"][0]
        self.assertGreater(min(l1["hit_tokens"], l1["read_bytes"], l1["written_bytes"]), 0, l1)
        self.daemon.stop()

    def test_pools_in_gpu_memory(self):
        program = os.path.join(BUILD, "tests", "integration", "kvtier-bench-fake-cuda")
        stats = self.replay(program, more=["--memory", "cuda"])
        l1, paths = stats["tiers"][0], stats["gpus"][0]["paths"]
        self.assertGreater(min(l1["hit_tokens"], l1["read_bytes"], l1["written_bytes"]), 0, l1)
        for path in ("from_engine_kernel", "to_engine_kernel", "to_host", "from_host"):
            self.assertGreater(paths[path]["bytes"], 0, path)
        self.daemon.stop()


class Operator(Daemon):
    """What an operator sees of two GPUs in use, and of one that is not there."""

    def test_figures_agree(self):
        self.start("devices=3", settings=["tiers.l1.gpus=1, 0, 7"])
        self.run_paged("--preset", "window")
        stats = self.daemon.stats()
        devices = json.loads(self.daemon.ctl("devices", "--json"))
        used = [gpu for gpu in devices["gpus"] if gpu["state"] == "ok"]
        self.assertEqual([gpu["index"] for gpu in devices["gpus"]], [1, 0, 7])
        self.assertEqual(len(used), 2)
        self.assertEqual((devices["l1"]["backend"], devices["l1"]["driver_version"],
                          devices["l1"]["why"]), ("cuda", 13000, ""))
        l1 = stats["tiers"][0]
        self.assertEqual(sum(gpu["used_bytes"] for gpu in used), l1["used_bytes"])
        self.assertEqual(sum(gpu["slots"] for gpu in used), 2 * l1["copies"])  # of two ranks
        self.assertEqual(sum(gpu["arena_bytes"] for gpu in used), l1["capacity_bytes"])
        counters = {(c["name"], c["label"]): c["value"] for c in stats["counters"]}
        for gpu in used:
            paths = gpu["paths"]
            self.assertGreater(sum(path["bytes"] for path in paths.values()), 0)
            for name, path in paths.items():
                label = f"gpu={gpu['index']},path={name}"
                self.assertEqual(counters["gpu_moved_bytes", label], path["bytes"])
                self.assertEqual(counters["gpu_transfers", label], path["transfers"])
            self.assertEqual(counters["gpu_launches", f"gpu={gpu['index']}"], gpu["launches"])
            self.assertEqual((gpu["inflight_bytes"], gpu["bad_checks"]), (0, 0))
        self.assertNotIn(("gpu_launches", "gpu=7"), counters)

    def test_pages(self):
        self.start("devices=2", settings=["tiers.l1.gpus=0, 7"])
        refused = "GPU 7 refused: no GPU 7; there are: 0 "
        for page in ("devices", "stats", "health"):
            self.assertIn(refused, self.daemon.ctl(page))
        self.assertIn("serving, degraded", self.daemon.ctl("health"))
        lines = self.log_lines("L1:")
        self.assertEqual(len(lines), 3, lines)
        self.assertRegex(lines[0], "L1: 8.00 MiB, 1 of 2 GPUs")
        self.assertRegex(lines[1], r"L1: GPU 0 .* \(GPU-[0-9a-f-]{36}\), arena of 8.00 MiB, sm_")
        self.assertIn("L1: not used: no GPU 7;", lines[2])

    def test_pages_of_none(self):
        self.start("devices=2,busy=1")
        for page in ("devices", "health"):
            for gpu in (0, 1):
                self.assertRegex(self.daemon.ctl(page),
                                 f"GPU {gpu} .*refused: GPU {gpu} is in exclusive mode")
        self.assertIn("256.0 MiB", self.daemon.ctl("devices"))
        self.assertEqual(len(self.log_lines("L1: not used: GPU")), 2)

    def test_pages_without_ipc(self):
        self.start("devices=2,no_ipc=1", settings=["tiers.l1.export=true"])
        page = self.daemon.ctl("devices")
        self.assertRegex(page, "GPU 1 .*: no IPC here: engines register memfds, and cannot read")
        self.assertNotIn("may read it in place", page)
        self.assertEqual(len(self.log_lines("no IPC here: engines register memfds")), 2)


class Losses(Daemon):
    def losses(self):
        return sum(gpu["losses"] for gpu in self.daemon.stats()["gpus"])

    def run_until_lost(self, *more):
        """When a context is lost is a matter of chance: as many loads as it takes, each of a model
        of its own, so that there is something to copy. Not for so many seconds: on a busy machine
        that is one load, and one in a hundred has no loss."""
        self.run_paged(*more)
        while self.losses() == 0 and self.model < LOADS_MAX:
            self.model += 1
            self.run_paged(*more)
        self.assertGreater(self.losses(), 0)

    def await_gpus(self, is_so):
        until = time.monotonic() + HUNG_SECONDS
        while not is_so(self.daemon.stats()["gpus"]):
            self.assertLess(time.monotonic(), until, self.daemon.stats()["gpus"])
            time.sleep(0.05)

    def test_contexts_that_are_lost(self):
        self.start("devices=2,lose_every=4000,late=1")
        self.run_until_lost("--preset", "window", *FAULTS)
        self.run_paged("--preset", "hybrid")
        self.await_gpus(lambda gpus: sum(gpu["revivals"] for gpu in gpus) > 0)
        self.daemon.stop()

    def test_a_reset_that_does_not_help(self):
        self.start("devices=1,lose_every=1000,broken_resets=1")
        self.run_until_lost("--preset", "window")
        self.await_gpus(lambda gpus: "restart the daemon" in gpus[0]["why"])
        self.assertEqual(self.daemon.stats()["gpus"][0]["state"], "lost")
        # L2 and L3 go on.
        self.assertGreater(self.run_paged("--preset", "full")["hit_tokens"], 0)
        self.daemon.stop()


def main():
    global ROOT, BUILD, PROGRAM, IS_REDUCED, SEED, gpu_replay, scratch
    ROOT, BUILD, PROGRAM = sys.argv[1:4]
    rest = sys.argv[4:]
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
    import gpu_replay  # noqa: E402 (their place is known only now)
    import scratch  # noqa: E402
    result = unittest.main(argv=[sys.argv[0], *rest], exit=False).result
    if result.wasSuccessful() and len(result.skipped) == result.testsRun:
        print(f"SKIP: {result.skipped[0][1]}")
        return SKIPPED
    return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
