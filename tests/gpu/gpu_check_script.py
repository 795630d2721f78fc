"""tools/gpu-check ends well only where everything did: what its parts find reaches the exit status.

    gpu_check_script.py SOURCE_ROOT BUILD [unittest arguments]

The programs are those on the fake, or scripts that do what a broken one would."""
import importlib.machinery
import importlib.util
import os
import shlex
import sys
import tempfile
import types
import unittest

ROOT = BUILD = ""
WRONG_BIT = "KVT_FAKE_CUDA_FLIP=3"  # in what the first launch writes
SCRIPT = "gpu_check"


def load_script():
    path = os.path.join(ROOT, "tools", "gpu-check")
    loader = importlib.machinery.SourceFileLoader(SCRIPT, path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(SCRIPT, loader))
    loader.exec_module(module)
    return module


class Script(unittest.TestCase):
    def setUp(self):
        self.script = load_script()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.fake = os.path.join(BUILD, "tests", "gpu", "gpu-check-fake")

    def make(self, name, *lines):
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n".join(("#!/bin/sh", *lines, "")))
        os.chmod(path, 0o755)
        return path


class Sanitizer(Script):
    """compute-sanitizer is a script here, which runs the program behind its own four options."""

    def run_under(self, *lines):
        sanitizer = self.make("compute-sanitizer", *lines)
        self.script.find_sanitizer = lambda: sanitizer
        options = types.SimpleNamespace(fake=False, device=0)
        programs = types.SimpleNamespace(check=self.fake)
        return self.script.run_sanitizer(options, programs, "memcheck", 60)

    def test_nothing_found(self):
        row = self.run_under("shift 4", 'exec "$@"')
        self.assertEqual((row["verdict"], row["wrong_bytes"]), ("ok", 0), row)
        self.assertGreater(row["cases"], 1)

    def test_wrong_bytes(self):
        row = self.run_under("shift 4", f'exec env {WRONG_BIT} "$@"')
        self.assertEqual(row["verdict"], "WRONG BYTES", row)
        self.assertGreater(row["wrong_bytes"], 0)

    def test_what_the_sanitizer_found(self):
        row = self.run_under("shift 4", '"$@"', f"exit {self.script.SANITIZER_FOUND}")
        self.assertEqual(row["verdict"], "FAILED", row)

    def test_a_bad_end_behind_a_good_report(self):
        row = self.run_under("shift 4", '"$@"', "exit 3")
        self.assertEqual(row["verdict"], "FAILED", row)

    def test_one_that_does_not_work_here(self):
        row = self.run_under("echo no such GPU", "exit 1")
        self.assertEqual(row["verdict"], "", row)
        self.assertIn("no such GPU", row["text"])


class Whole(Script):
    """main() with programs that are scripts: its exit status."""

    def run_main(self, check, bench=("exit 1",), arguments=()):
        script = self.script
        programs = types.SimpleNamespace(
            build=BUILD, check=self.make("check", *check), bench=self.make("bench", *bench),
            daemon=os.path.join(BUILD, "tests", "integration", "kvtierd-fake-cuda"),
            model=os.path.join(BUILD, "tests", "device", "test-gpu_model_table"))
        script.Programs = lambda build, is_fake: programs
        report = os.path.join(self.folder, "report.json")
        sys.argv = [SCRIPT, "--fake", "--no-build", "--build", BUILD, "--seconds", "20", "--json",
                    report, *arguments]
        status = script.main()
        return status, script.read_report(report)

    def without_replay(self):
        self.script.replay = lambda *_: []

    def check_lines(self, *after):
        return (f'{shlex.quote(self.fake)} "$@" --parts correct', *after)

    def test_all_is_well(self):
        self.without_replay()
        status, report = self.run_main(self.check_lines())
        self.assertEqual((status, report["failures"], report["wrong_bytes"]), (0, 0, 0))
        self.assertIn("model", [row["part"] for row in report["rows"]])

    def test_wrong_bytes(self):
        self.without_replay()
        status, report = self.run_main((f"export {WRONG_BIT}", *self.check_lines()))
        self.assertEqual(status, 1)
        self.assertGreater(report["wrong_bytes"], 0)

    def test_a_bad_end_behind_a_good_report(self):
        self.without_replay()
        status, report = self.run_main(self.check_lines("kill -SEGV $$"))
        self.assertEqual((status, report["failures"], report["wrong_bytes"]), (1, 1, 0))

    def test_no_report(self):
        self.assertEqual(self.run_main(("exit 0",))[0], 1)
        self.assertEqual(self.run_main(("kill -SEGV $$",))[0], 1)
        self.assertEqual(self.run_main(("exit 77",))[0], 77)

    def replays(self, bench):
        """Rows of the replay with such a bench; the status of all."""
        gpu_replay = sys.modules["gpu_replay"]
        gpu_replay.RUNS = gpu_replay.RUNS[:1]
        gpu_replay.SECONDS_HUNG = 2
        status, report = self.run_main(self.check_lines(), bench)
        return status, [row for row in report["rows"] if row["part"] == "replay"]

    def test_a_replay_that_hangs(self):
        status, rows = self.replays(("exec sleep 1000",))
        self.assertEqual((status, rows[0]["verdict"]), (1, "FAILED"), rows)
        self.assertIn("not done", rows[0]["text"])

    def test_a_replay_that_fails(self):
        status, rows = self.replays(("exit 3",))
        self.assertEqual((status, rows[0]["verdict"]), (1, "FAILED"), rows)

    def test_a_replay_that_is_without_l1(self):
        status, rows = self.replays((
            """echo '{"wrong_bytes": 0, "verified_blocks": 7, "hit_tokens_by_tier": {"L1": 0},""",
            """"leases_left": 0, "reservations_left": 0, "pins_left": 0}'""",))
        self.assertEqual((status, rows[0]["verdict"]), (1, "FAILED"), rows)
        self.assertIn("L1", rows[0]["text"])


def main():
    global ROOT, BUILD
    ROOT, BUILD = sys.argv[1:3]
    sys.path.insert(0, os.path.join(ROOT, "tools", "lib"))
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])


if __name__ == "__main__":
    main()
