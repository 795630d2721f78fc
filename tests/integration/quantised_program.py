"""A real kvtierd and engines whose attention is quantised (kvtier-bench --quantise): every byte
that comes back is what its code stands for, from each tier, after restarts, whatever engines do.

    quantised_program.py SOURCE_ROOT BUILD [--reduced] [unittest arguments]"""
import os
import sys
import unittest

ROOT = BUILD = ""
IS_REDUCED = False
MIB = 1 << 20


class Quantised(unittest.TestCase):
    def setUp(self):
        self.daemon = None

    def start(self, l1=0, l2=4 * MIB, l3=64 * MIB):
        self.daemon = scratch.ScratchDaemon(BUILD, l1, l2, l3, index="16MiB")
        self.daemon.__enter__()
        self.addCleanup(self.daemon.clean_up)

    def run_bench(self, quantise, *more, limit=100):
        status, result = scratch.bench_run(BUILD, [
            "synth", "--socket", self.daemon.socket, "--seed", "3", "--namespace", self.id(),
            "--limit", str(min(limit, 40) if IS_REDUCED else limit), "--deadline", "60000",
            "--quiet", "--quantise", quantise, *more])
        self.assertEqual(result["wrong_bytes"], 0, result)
        self.assertEqual(result["stray_bytes"], 0, result)
        self.assertEqual(status, 0)
        self.assertGreater(result["verified_blocks"], 0)
        self.daemon.check_alive()
        return result

    def namespaces(self):
        return self.daemon.stats()["namespaces"]

    def restart(self):
        self.daemon.stop()
        self.daemon.start()

    def check_stored(self, quantise):
        """Attention takes about half, a state what it is; and so says every slot in L3."""
        (ns,) = self.namespaces()
        stored = set()
        for component in ns["components"]:
            stored.add(component["stored_bytes_per_block"])
            if component["kind"] == "state":
                self.assertEqual(component["quantisation"], "none")
                self.assertEqual(component["stored_bytes_per_block"], component["bytes_per_block"])
            else:
                self.assertEqual(component["quantisation"], quantise)
                self.assertLess(component["stored_bytes_per_block"],
                                0.53 * component["bytes_per_block"])
        self.assertEqual(self.payloads_in_l3(), stored)

    def payloads_in_l3(self):
        """The payload sizes in the headers of all slots; docs/formats.md."""
        found = set()
        for path in self.daemon.l3_paths:
            with open(path, "rb") as file:
                data = file.read()
            for at in range(2 * MIB, len(data), 4096):
                if data[at:at + 8] == b"KVTSLOT1":
                    found.add(int.from_bytes(data[at + 160:at + 168], "little"))
        return found

    def test_tiers_and_restarts(self):
        for quantise, preset in (("fp8_e4m3", "hybrid"), ("int8", "window")):
            with self.subTest(quantise=quantise):
                self.start()
                self.run_bench(quantise, "--preset", preset, "--ranks", "2")
                self.restart()
                self.check_stored(quantise)
                # The same requests: what the first asks for is in L3 alone.
                again = self.run_bench(quantise, "--preset", preset, "--ranks", "2", limit=20)
                self.assertGreater(again["hit_tokens_by_tier"]["L3"], 0)
                self.daemon.kill()
                self.daemon.start()
                again = self.run_bench(quantise, "--preset", preset, "--ranks", "2", limit=20)
                self.assertGreater(again["hit_tokens_by_tier"]["L3"], 0)
                self.daemon.stop()

    def test_through_l1(self):
        self.start(l1=4 * MIB)
        self.run_bench("fp8_e4m3", "--preset", "mla", "--ranks", "2", "--engines", "2",
                       "--concurrency", "2", "--kill-engine-every", "20", "--cancel-every", "7")
        self.assertGreater(sum(c["copies_at"][0] for c in self.namespaces()[0]["components"]), 0)

    def test_paged_engines(self):
        self.start()
        self.run_bench("int8", "--paged", "--preset", "hybrid", "--ranks", "2", "--concurrency",
                       "6", "--layers", "2", "--bytes-per-token", "96", "--window", "300",
                       "--state-bytes", "1600", "--store-output", "--abort-every", "5",
                       "--cancel-every", "7", "--late-us", "1000")

    def test_another_quantisation_is_another_namespace(self):
        self.start()
        prints = set()
        for quantise in ("none", "fp8_e4m3", "int8"):
            before = {ns["fingerprint"] for ns in self.namespaces()}
            self.run_bench(quantise, limit=40)
            (new,) = {ns["fingerprint"] for ns in self.namespaces()} - before
            prints.add(new)
        self.assertEqual(len(prints), 3)


def main():
    global ROOT, BUILD, IS_REDUCED, scratch
    ROOT, BUILD = sys.argv[1:3]
    rest = sys.argv[3:]
    if "--reduced" in rest:
        rest.remove("--reduced")
        IS_REDUCED = True
    sys.path.insert(0, os.path.join(ROOT, "tools", "lib"))
    import scratch  # noqa: E402 (its place is known only now)
    unittest.main(argv=[sys.argv[0], *rest])


if __name__ == "__main__":
    main()
