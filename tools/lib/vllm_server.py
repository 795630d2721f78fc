"""vLLM's HTTP server on the CPU as a child process, with kvtierd's connector: started, asked, its
metrics read, stopped whatever happens. Used by tools/demo-vllm. Standard library only: vLLM
itself lives in a virtual environment."""
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time
from dataclasses import dataclass

from scratch import ROOT, Broken

START_SECONDS_MAX = 300
ANSWER_SECONDS_MAX = 120
STOP_SECONDS_MAX = 30
BLOCK_TOKENS = 32
SAMPLE = re.compile(r"^(vllm:\S+) (\S+)$")

# Repeatable sums, no compilation in the middle of a measurement, no look at the network.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONHASHSEED": "0",
    "VLLM_LOG_STATS_INTERVAL": "2",
}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Answer:
    """@tokens, and where the prompt's came from."""

    tokens: list
    first_token_ms: float
    computed_tokens: int = 0
    own_hit_tokens: int = 0
    kvtierd_hit_tokens: int = 0


def parse_metrics(page):
    """vLLM's series, as "name{labels}": value."""
    return {match[1]: float(match[2]) for match in map(SAMPLE.match, page.splitlines()) if match}


class VllmServer:
    """One engine: server.start(), server.wait_ready(), server.ask(tokens), server.stop().

    @directory is for its log and sockets, @options for the connector."""

    def __init__(self, name, python, model, directory, kv_bytes, options):
        self.name, self.python, self.model = name, python, model
        self.directory, self.kv_bytes = directory, kv_bytes
        self.options = {"name": name, **options}
        self.log_path = os.path.join(directory, f"{name}.log")
        self.process = self.port = None

    def transfer_config(self):
        return {"kv_connector": "KvtierConnector", "kv_connector_module_path": "kvtier.vllm",
                "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": self.options}

    def command(self):
        return [self.python, "-m", "vllm.entrypoints.openai.api_server",
                "--model", self.model, "--served-model-name", "model",
                "--host", "127.0.0.1", "--port", str(self.port),
                "--dtype", "float32", "--enforce-eager", "--seed", "0",
                "--block-size", str(BLOCK_TOKENS), "--max-model-len", "4096",
                "--max-num-seqs", "4", "--max-num-batched-tokens", "4096",
                "--kv-cache-memory-bytes", str(self.kv_bytes),
                "--kv-transfer-config", json.dumps(self.transfer_config())]

    def start(self):
        """Starts it (again) without waiting."""
        self.port = free_port()
        packages = os.path.join(ROOT, "clients", "python", "src")
        path = os.pathsep.join(filter(None, [packages, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path,
                       "VLLM_RPC_BASE_PATH": self.directory, "TMPDIR": self.directory}
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                cwd=self.directory, start_new_session=True)

    def is_ready(self):
        self.check_alive()
        try:
            return self.get("/health")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def wait_ready(self, on_wait=lambda seconds: None):
        """Waits until it answers; @on_wait hears about once a second how long it took so far."""
        began = time.monotonic()
        while not self.is_ready():
            waited = time.monotonic() - began
            if waited > START_SECONDS_MAX:
                raise Broken(f"engine {self.name} did not come up in {START_SECONDS_MAX} s:\n"
                             f"{self.log_tail()}")
            on_wait(waited)
            time.sleep(0.5)

    def check_alive(self):
        if self.process.poll() is not None:
            raise Broken(f"engine {self.name} ended with status {self.process.returncode}; the end "
                         f"of its log:\n{self.log_tail()}")

    def log_lines(self):
        with open(self.log_path, errors="replace") as log:
            return log.read().splitlines()

    def log_tail(self, lines=15):
        return "\n".join(self.log_lines()[-lines:])

    def get(self, path):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def metrics(self):
        return parse_metrics(self.get("/metrics")[1])

    def ask(self, prompt, output_tokens):
        """One greedy request of token ids, streamed: the answer's ids, the time to the first."""
        before = self.metrics()
        answer = self.stream({
            "model": "model", "prompt": prompt, "max_tokens": output_tokens, "temperature": 0,
            "stream": True, "return_token_ids": True, "ignore_eos": True})
        after = self.metrics()
        answer.computed_tokens, answer.own_hit_tokens, answer.kvtierd_hit_tokens = (
            prompt_tokens_from(after, source) - prompt_tokens_from(before, source)
            for source in ("local_compute", "local_cache_hit", "external_kv_transfer"))
        return answer

    def stream(self, body):
        self.check_alive()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS_MAX)
        try:
            began = time.monotonic()
            connection.request("POST", "/v1/completions", json.dumps(body),
                               {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise Broken(f"engine {self.name} answered {response.status}: "
                             f"{response.read().decode()[:500]}")
            return read_stream(response, began)
        except (OSError, http.client.HTTPException) as error:
            raise Broken(f"engine {self.name} broke off ({error}); the end of its log:\n"
                         f"{self.log_tail()}") from error
        finally:
            connection.close()

    def stop(self):
        """Ends it and all its processes; may be repeated. When the server has ended, those that it
        started still unlink their shared memory: only what hangs is killed."""
        if self.process is None:
            return
        until = time.monotonic() + STOP_SECONDS_MAX
        self.process.terminate()
        while is_alive(self.process.pid) and time.monotonic() < until:
            time.sleep(0.05)
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self.process = None


def is_alive(group):
    """Whether a process of this group runs; one that nobody has waited for does not."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                state, _, its_group = stat.read().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_group) == group and state != "Z":
            return True
    return False


def prompt_tokens_from(metrics, source):
    """How many tokens of prompts so far came from there, as vLLM counts."""
    return sum(int(value) for series, value in metrics.items()
               if series.startswith("vllm:prompt_tokens_by_source_total{")
               and f'source="{source}"' in series)


def read_stream(response, began):
    tokens, first = [], None
    for line in response:
        text = line.decode().strip()
        if not text.startswith("data: ") or text == "data: [DONE]":
            continue
        for choice in json.loads(text[len("data: "):]).get("choices", []):
            if choice.get("token_ids"):
                first = first or time.monotonic()
                tokens += choice["token_ids"]
    if first is None:
        raise Broken("an answer without a token")
    return Answer(tokens, 1000 * (first - began))
