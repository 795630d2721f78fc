"""The main job of tools/demo-vllm: one kvtierd, two vLLM engines, one conversation. Engine A
computes it, engine B gets it from kvtierd, and so does engine B after a restart; the answers are
compared.

    demo_vllm.py BUILD PYTHON      PYTHON: the interpreter of vLLM's virtual environment"""
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time

sys.dont_write_bytecode = True
from scratch import ROOT, Broken, ScratchDaemon, run_script  # noqa: E402
from vllm_server import VllmServer  # noqa: E402

L2, L3 = 256 << 20, 512 << 20
KV_BYTES = 256 << 20  # of each engine: 16,384 tokens of the model
# A machine that is busy with two engines on few cores may answer late.
OPTIONS = {"lookup_timeout_ms": 500}
VOCABULARY = range(3, 512)
SYSTEM_TOKENS, TURN_TOKENS, ANSWER_TOKENS, TURNS = 1600, 160, 24, 3
WARM_UP_TOKENS = 1000
STORE_SECONDS_MAX = 20
step_count = 0


def say(text):
    global step_count
    step_count += 1
    print(f"\n>>> {step_count}/5  {text}", flush=True)


def make_model(python, directory):
    command = [python, os.path.join(ROOT, "tools", "lib", "wide_model.py"), directory]
    if subprocess.run(command, check=False).returncode != 0:
        raise Broken("the model could not be made")


def wait_ready(engines):
    """Both at once: most of a start is importing Python modules and waits for the disk."""
    is_terminal = sys.stdout.isatty()
    shown = [0.0]

    def on_wait(seconds):
        if is_terminal:
            print(f"\r    waiting for vLLM: {seconds:3.0f} s ", end="", flush=True)
        elif seconds - shown[0] >= 15:
            shown[0] = seconds
            print(f"    still waiting for vLLM after {seconds:.0f} s", flush=True)

    began = time.monotonic()
    for engine in engines:
        engine.wait_ready(on_wait)
    start = "\r" if is_terminal else ""
    names = " and ".join(engine.name for engine in engines)
    print(f"{start}    engine {names} ready after {time.monotonic() - began:.0f} s", flush=True)


def conversation(seed=5):
    """What the user's side says: the first turn brings a long system prompt along."""
    draw = random.Random(seed)
    return [[draw.choice(VOCABULARY) for _ in range(TURN_TOKENS + (0 if turn else SYSTEM_TOKENS))]
            for turn in range(TURNS)]


def talk(engine, turns):
    """Rows of (prompt tokens, Answer): each prompt is the whole conversation so far."""
    rows, so_far = [], []
    for turn in turns:
        so_far = so_far + turn
        answer = engine.ask(so_far, ANSWER_TOKENS)
        rows.append((len(so_far), answer))
        so_far = so_far + answer.tokens
    return rows


def warm_up(engine):
    """The first request of an engine pays for things that have nothing to do with the cache."""
    draw = random.Random()
    engine.ask([draw.choice(VOCABULARY) for _ in range(WARM_UP_TOKENS)], 2)


def wait_until_stored(daemon):
    until = time.monotonic() + STORE_SECONDS_MAX
    while True:
        stats = daemon.stats()
        if stats["ops_running"] == 0 and stats["tickets"] == 0 and stats["blocks"] > 0:
            return
        if time.monotonic() > until:
            raise Broken(f"the stores of engine A did not end in {STORE_SECONDS_MAX} s: "
                         f"{stats['blocks']} blocks, {stats['ops_running']} requests, "
                         f"{stats['tickets']} tickets")
        time.sleep(0.1)


def print_rows(title, rows, reference):
    print(f"    {title}")
    for turn, (prompt_tokens, answer) in enumerate(rows):
        is_same = answer.tokens == reference[turn][1].tokens
        verdict = "" if rows is reference else "same answer" if is_same else "ANOTHER ANSWER"
        print(f"    {turn + 1:>6}{prompt_tokens:>9,}{answer.kvtierd_hit_tokens:>14,}"
              f"{answer.own_hit_tokens:>12,}{answer.computed_tokens:>11,}"
              f"{answer.first_token_ms:>12,.0f} ms   {verdict}".rstrip(), flush=True)


def print_table(cold, warm, restarted):
    print(f"\n    {'turn':>6}{'prompt':>9}{'from kvtierd':>14}{'own cache':>12}{'computed':>11}"
          f"{'first token':>15}")
    print_rows("engine A", cold, cold)
    print_rows("engine B, which never saw the conversation", warm, cold)
    print_rows("engine B, stopped and started again", restarted, cold)


def problems_of(cold, others):
    found = []
    for title, rows in others.items():
        if [row[1].tokens for row in rows] != [row[1].tokens for row in cold]:
            found.append(f"{title} answered otherwise than engine A")
        if rows[0][1].kvtierd_hit_tokens == 0:
            found.append(f"{title} got nothing from kvtierd")
    if cold[0][1].kvtierd_hit_tokens != 0:
        found.append("engine A hit in an empty cache")
    return found


def print_engine_side(engine):
    """What vLLM itself says about it, in its log and in its endpoint."""
    lines = [line for line in engine.log_lines() if "KV Transfer metrics" in line]
    if lines:
        print(f"\n    Engine {engine.name} says in its log (every 10 s when it is busy):")
        line = re.sub(r"^.*?KV Transfer", "KV Transfer", lines[-1])
        print(textwrap.fill(line, 98, initial_indent=" " * 6, subsequent_indent=" " * 8))
    print("    and at /metrics:")
    wanted = re.compile(r"vllm:(external_prefix_cache_(queries|hits)_total|"
                        r"kvtierd_(hit_tokens_total|transfer_bytes_total|attached))\{")
    for name, value in engine.metrics().items():
        if wanted.match(name):
            label = re.sub(r'engine="0",|model_name="model",?|,?engine="0"', "", name)
            print(f"      {label.replace('{}', '').replace(',}', '}'):<58}{value:>14,.0f}")


def print_daemon_side(stats):
    print("    kvtierd says (kvtier-ctl stats shows all of it):")
    for engine in stats["engines"]:
        print(f"      engine {engine['name']}: looked up {engine['lookup_tokens']:,} tokens, "
              f"{engine['hit_tokens']:,} were there already; stored "
              f"{engine['demoted_bytes'] / 1e6:,.1f} MB, loaded "
              f"{engine['promoted_bytes'] / 1e6:,.1f} MB")


def show(daemon, engine_a, engine_b):
    turns = conversation()
    wait_ready([engine_a, engine_b])
    warm_up(engine_a)
    warm_up(engine_b)
    say(f"A conversation of {TURNS} turns with engine A, which has to compute it. Each turn's "
        "prompt is\n         the whole conversation so far. Then the same with engine B.")
    cold = talk(engine_a, turns)
    wait_until_stored(daemon)
    warm = talk(engine_b, turns)
    wait_until_stored(daemon)
    say("Stopping engine B and starting it again: its own cache is empty, kvtierd's is not.")
    engine_b.stop()
    engine_b.start()
    wait_ready([engine_b])
    warm_up(engine_b)
    restarted = talk(engine_b, turns)
    say("Result (tokens; the answers are greedy).")
    print_table(cold, warm, restarted)
    print_engine_side(engine_b)
    print_daemon_side(daemon.stats())
    found = problems_of(cold, {"engine B": warm, "engine B after its restart": restarted})
    if found:
        raise Broken("; ".join(found))
    first = cold[0][1].first_token_ms
    print(f"""
    All answers are the same. The first token of the first turn came after {first:,.0f} ms where the
    prompt was computed, after {sooner(warm, first)} in the other engine, and after
    {sooner(restarted, first)} in the restarted one.""")


def sooner(rows, first_ms):
    took_ms = rows[0][1].first_token_ms
    return f"{took_ms:,.0f} ms ({first_ms / took_ms:.0f} times sooner)"


def main():
    build, python = sys.argv[1:]
    scratch = tempfile.mkdtemp(prefix="kvtier-demo-")
    is_kept = False
    try:
        say(f"Making a model of random weights in {scratch} (nothing is downloaded).")
        model = os.path.join(scratch, "model")
        make_model(python, model)
        say("Starting kvtierd (256 MiB of memory, 512 MiB of disk) and two vLLM servers with its "
            "connector.\n         That takes about a minute on two cores.")
        with ScratchDaemon(build, 0, L2, L3, settings=["tiers.l1.backend=none"]) as daemon:
            options = {"socket": daemon.socket, **OPTIONS}
            engines = [VllmServer(name, python, model, scratch, KV_BYTES, options)
                       for name in ("A", "B")]
            try:
                for engine in engines:
                    engine.start()
                show(daemon, *engines)
            finally:
                for engine in engines:
                    engine.stop()
    except Broken as broken:
        is_kept = True
        raise Broken(f"{broken}\nThe engines' logs are kept: {scratch}/*.log") from None
    finally:
        if not is_kept:
            shutil.rmtree(scratch, ignore_errors=True)
    print("""
Where to go next
  docs/vllm.md                     the same with your engine, each option, what to watch
  deploy/kvtierd.service           kvtierd as a service
""")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
