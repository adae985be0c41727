"""Faults on purpose: operations are killed, run out of disk or memory, or find damaged files, and are then repeated.

    python experiments/faults.py --rounds 20
    python experiments/faults.py --rounds 5 --operations distill translate --faults kill damage
    python experiments/faults.py --quick

A round makes a new folder, runs an operation with a fault at a random time or place, repeats the same command without
it, and compares what it wrote with an uninterrupted run: translated lines, logged updates and weights, exported files.
The table has what was lost and duplicated, the rounds that ended with the same result, and those in which the command
refused the damaged file by name instead of using it. Everything is drawn with a fixed seed, except what the scheduling
of processes decides. Models are tiny and random; processes are forked, so that a round takes about a second.

`disk` and `read-only` use a tmpfs and a read-only mount, which only root may make; other users have a limit on the
size of files and a folder without the permission to write.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from safetensors.torch import load_file
from transformers import MarianConfig, MarianMTModel

from hf_deqnar import DeqNarConfig, DeqNarForConditionalGeneration
from hf_deqnar.cli import line_translation
from hf_deqnar.cli.main import main as command_line
from hf_deqnar.data.parallel_text import read_parallel
from hf_deqnar.data.tokenizer import train_tokenizer
from hf_deqnar.export.manifest import read_manifest
from hf_deqnar.utils.fingerprints import digest_tensors

PAIRS = Path(__file__).parent.parent / "tests" / "data" / "pairs.jsonl"
SEED = 0
KILLS = 3  # at most, of one run
UPDATES = 6
LONGEST = 180  # seconds after which a process is stuck


class Broken(AssertionError):
    """An operation did what it must not do."""


@dataclass
class Models:
    """Inputs of all operations, made once."""

    folder: Path

    def __post_init__(self) -> None:
        pairs = read_parallel(PAIRS, "en", "de")
        self.data = self.folder / "pairs.jsonl"
        shutil.copy(PAIRS, self.data)
        self.lines = self.folder / "lines.en"
        self.lines.write_text("".join(f"{pair.source}\n" for pair in pairs), encoding="utf-8")
        tokenizer = train_tokenizer([text for pair in pairs for text in (pair.source, pair.references[0])], 400)
        sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 128}
        ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "eos", "bos")}
        torch.manual_seed(SEED)
        teacher = MarianConfig(
            vocab_size=len(tokenizer), **sizes, **heads, **ids, init_std=0.5, decoder_start_token_id=ids["pad_token_id"]
        )
        self.teacher = self._save(MarianMTModel(teacher), tokenizer, "teacher")
        fields = {"vocab_size": len(tokenizer), **sizes, **heads, "max_nfe": 4}
        students = {
            length: DeqNarForConditionalGeneration(DeqNarConfig.preset("tiny", **fields, length=length))
            for length in ("ctc", "predict")
        }
        self.student = self._save(students["ctc"], tokenizer, "ctc")
        self.masked = self._save(students["predict"], tokenizer, "predict")

    def _save(self, model: torch.nn.Module, tokenizer: object, name: str) -> Path:
        model.eval().save_pretrained(self.folder / name)
        tokenizer.save_pretrained(self.folder / name)
        return self.folder / name


@dataclass
class Operation:
    """A command whose output is in one folder.

    Attributes:
        command: from the models and the folder of a round to the arguments of `hf-deqnar`.
        units: what is in the folder when it is done; comparable, and one string for each thing that can be lost.
        damageable: patterns of files that a repeated command reads, which `damage` breaks.
        out_of_memory: what is replaced by a function that runs out of memory.
    """

    command: Callable[[Models, Path], list[str]]
    units: Callable[[Path], list[str]]
    damageable: tuple[str, ...] = ()
    out_of_memory: tuple[object, str] | None = None


def training(verb: str, *flags: str) -> Callable[[Models, Path], list[str]]:
    def command(models: Models, folder: Path) -> list[str]:
        names = {"{student}": models.masked, "{teacher}": models.teacher}
        return [
            verb, *(str(names.get(flag, flag)) for flag in flags), "--train_data", str(models.data),
            "--validation_data", str(models.data), "--validation_limit", "2", "--source", "en", "--target", "de",
            "--max_length", "60", "--max_tokens", "300", "--learning_rate", "1e-3", "--warmup_steps", "2",
            "--max_steps", str(UPDATES), "--eval_strategy", "steps", "--eval_steps", "3", "--save_strategy", "steps",
            "--save_steps", "2", "--logging_steps", "1", "--use_cpu", "true", "--disable_tqdm", "true",
            "--report_to", "none", "--cache_dir", str(folder / "cache"), "--output_dir", str(folder / "run"),
        ]  # fmt: skip

    return command


def trained(folder: Path) -> list[str]:
    """Every logged update, and the weights."""
    state = json.loads((folder / "run" / "trainer_state.json").read_text())
    digest = hashlib.sha256()
    digest_tensors(load_file(folder / "run" / "model.safetensors"), digest)
    logged = [f"update {entry['step']}: {entry['loss']}" for entry in state["log_history"] if "loss" in entry]
    return [*logged, f"weights {digest.hexdigest()}"]


def lines_of(name: str) -> Callable[[Path], list[str]]:
    return lambda folder: (folder / name).read_text(encoding="utf-8").splitlines()


def exported(folder: Path) -> list[str]:
    return [f"{name} {digest}" for name, digest in read_manifest(folder / "export" / "fp32")["files"].items()]


SMALL = ("--vocab_size", "400", "--config", "d_model=32", "encoder_layers=1", "decoder_layers=1")
TRAINED = ("run/checkpoint-*/*", "run/best/*", "run/run.json", "run/tokenizer/trained_on.json", "cache/**/*.arrow")
OPERATIONS: dict[str, Operation] = {
    "teacher": Operation(
        training("teacher", *SMALL),
        trained, TRAINED, (MarianMTModel, "forward"),
    ),
    "train": Operation(
        training("train", *SMALL, "max_nfe=4", "--objective", "ctc+glat"),
        trained, TRAINED, (DeqNarForConditionalGeneration, "forward"),
    ),
    "energy": Operation(
        training("energy", "--student", "{student}", "--teacher", "{teacher}", "--max_nfe", "3"),
        trained, TRAINED, (DeqNarForConditionalGeneration, "forward"),
    ),
    "distill": Operation(
        lambda models, folder: [
            "distill", "--teacher", str(models.teacher), "--data", str(models.data), "--source", "en", "--target", "de",
            "--num_beams", "2", "--max_length", "24", "--shard_sentences", "4", "--output", str(folder / "out.jsonl"),
        ],
        lines_of("out.jsonl"), ("out.jsonl", "out.jsonl.shards/*.json*", "out.jsonl.statistics.json"),
        (MarianMTModel, "generate"),
    ),
    "translate": Operation(
        lambda models, folder: [
            "translate", "--model", str(models.student), "--input", str(models.lines), "--batch_size", "1",
            "--processes", "1", "--output", str(folder / "out.de"),
        ],
        lines_of("out.de"), ("out.de.unfinished", "out.de.unfinished.json"),
        (DeqNarForConditionalGeneration, "generate"),
    ),
    "export": Operation(
        lambda models, folder: ["export", str(models.student), str(folder / "export"), "--fp32", "--limit", "4"],
        exported, ("export/fp32/*",),
    ),
}  # fmt: skip


@dataclass
class Process:
    """A forked process that runs `hf-deqnar`."""

    pid: int
    log: Path
    status: int | None = None  # negative: the signal that ended it

    def wait(self, seconds: float = LONGEST) -> int | None:
        """The exit status; None if it is still running after these seconds."""
        deadline = time.monotonic() + seconds
        while self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                return None
            else:
                time.sleep(0.002)
        return self.status

    def kill(self, number: int) -> None:
        """Send a signal to the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def finish(self) -> int:
        """Wait; a process that is stuck is killed, and that is a fault of its own."""
        if self.wait() is None:
            self.kill(signal.SIGKILL)
            self.wait()
            raise Broken(f"still running after {LONGEST} seconds")
        assert self.status is not None
        return self.status

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


def start(arguments: list[str], log: Path, prepare: Callable[[], object] = lambda: None) -> Process:
    """Run `hf-deqnar` in a fork of this process; `prepare` is called in it first."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        with contextlib.suppress(PermissionError, ProcessLookupError):  # the child does it as well
            os.setpgid(pid, pid)
        return Process(pid, log)
    status = 70
    try:
        os.setpgid(0, 0)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(descriptor, number)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.set_num_threads(1)
        prepare()
        try:
            status = command_line(arguments)
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


@dataclass
class Round:
    """One attempt: an operation, its new folder, and what it should write."""

    operation: Operation
    models: Models
    folder: Path
    expected: list[str]
    seconds: float  # of an uninterrupted run
    random: random.Random
    processes: int = 0

    def start(self, prepare: Callable[[], object] = lambda: None) -> Process:
        self.processes += 1
        log = self.folder.with_name(f"{self.folder.name}.{self.processes}.log")
        return start(self.operation.command(self.models, self.folder), log, prepare)

    def moment(self) -> float:
        return self.random.uniform(0, self.seconds)

    def refused(self, process: Process, *named: str) -> None:
        """Check that a process ended with status 2 and one readable line, which contains one of the given texts."""
        status, said = process.finish(), process.said()
        lines = said.strip().splitlines()
        if status != 2 or "Traceback" in said or not lines or not lines[-1].startswith("hf-deqnar"):
            raise Broken(f"status {status} instead of one line of error:\n{said[-3000:]}")
        if named and not any(text in lines[-1] for text in named):
            raise Broken(f"the error does not name {' or '.join(named)}: {lines[-1]}")

    def completes(self) -> None:
        process = self.start()
        if process.finish() != 0:
            raise Broken(f"the repeated command ended with status {process.status}:\n{process.said()[-3000:]}")


@dataclass
class Outcome:
    """Totals of all rounds of an operation with a fault."""

    rounds: int = 0
    lost: int = 0
    duplicated: int = 0
    correct: int = 0
    refused: int = 0
    injected: int = 0
    problems: list[str] = field(default_factory=list)


# ---- Faults: each leaves a folder in which the operation is complete, and says how often the fault occurred.
# A fault returns None if the repeated command refused a damaged file by name.


def kill(attempt: Round) -> int:
    """SIGKILL at random times, up to three times."""
    kills = 0
    for _ in range(attempt.random.randint(1, KILLS)):
        process = attempt.start()
        if process.wait(attempt.moment()) is None:
            process.kill(signal.SIGKILL)
            kills += 1
        process.finish()
    attempt.completes()
    return kills


def clock(attempt: Round) -> int:
    """SIGKILL, then all files of the folder, and so the locks, are a day old or from tomorrow."""
    process = attempt.start()
    killed = process.wait(attempt.moment()) is None
    process.kill(signal.SIGKILL)
    process.finish()
    moved = time.time() + attempt.random.choice([-86400, 86400])
    locks = list(attempt.folder.rglob("*.lock"))
    if locks and attempt.random.random() < 0.5:  # as if it had been killed while it created them
        for path in locks:
            path.write_bytes(b"")
    for path in attempt.folder.rglob("*"):
        os.utime(path, (moved, moved))
    attempt.completes()
    return int(killed)


def terminate(attempt: Round) -> int:
    """SIGTERM: the process ends by itself with status 143, and nothing temporary is left but what is resumed from."""
    process = attempt.start()
    sent = process.wait(attempt.moment()) is None
    os.kill(process.pid, signal.SIGTERM) if sent else None
    status = process.finish()
    if status not in (0, 143, -signal.SIGTERM if sent else 0):  # the last: before the handler is installed
        raise Broken(f"status {status} after SIGTERM:\n{process.said()[-3000:]}")
    if status == 143:
        left = [path.name for path in attempt.folder.rglob("*.lock")]
        if left:
            raise Broken(f"{left} left after SIGTERM")
    if "Ended by SIGTERM after update" in process.said():
        number = process.said().split("checkpoint-")[-1].split()[0]
        if not (attempt.folder / "run" / f"checkpoint-{number}" / "trainer_state.json").is_file():
            raise Broken(f"there is no checkpoint-{number}, though the command says so")
    attempt.completes()
    return int(sent)


def damage(attempt: Round) -> int | None:
    """Killed, or complete; then a file is cut off or has a flipped bit."""
    process = attempt.start()
    if process.wait(attempt.random.uniform(0.5, 1.2) * attempt.seconds) is None:
        process.kill(signal.SIGKILL)
    process.finish()
    files = [path for pattern in attempt.operation.damageable for path in attempt.folder.glob(pattern)]
    files = [path for path in files if path.is_file() and path.stat().st_size]
    if not files:
        attempt.completes()
        return 0
    chosen = attempt.random.choice(sorted(files))
    content = bytearray(chosen.read_bytes())
    if attempt.random.random() < 0.5:
        content = content[: attempt.random.randrange(len(content))]
    else:
        content[attempt.random.randrange(len(content))] ^= 1 << attempt.random.randrange(8)
    chosen.unlink()
    chosen.write_bytes(content)
    again = attempt.start()
    if again.finish() == 0:
        return 1
    attempt.refused(again, *(part.name for part in (chosen, *list(chosen.parents)[:3])))
    return None


def disk(attempt: Round) -> int:
    """The disk is full after a random number of bytes; then there is space."""
    attempt.start().finish()
    sizes = [path.stat().st_size for path in attempt.folder.rglob("*") if path.is_file()]
    shutil.rmtree(attempt.folder)
    attempt.folder.mkdir()
    if os.geteuid() == 0:
        pages = attempt.random.randrange(1, max(2, sum(sizes) // 4096))
        with mounted(attempt.folder, "-t", "tmpfs", "-o", f"size={pages * 4096}", "tmpfs"):
            process = attempt.start()
            full = process.finish() != 0
            if full:
                attempt.refused(process, "No space left", "no space left", "Errno 28", "os error 28")
            subprocess.run(["mount", "-o", "remount,size=1g", str(attempt.folder)], check=True)
            attempt.completes()
            copy = shutil.copytree(attempt.folder, attempt.folder.with_name(f"{attempt.folder.name}.copy"))
        shutil.copytree(copy, attempt.folder, dirs_exist_ok=True)
        return int(full)
    most = attempt.random.randrange(1, max(sizes))
    process = attempt.start(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)))
    full = process.finish() != 0
    if full:
        attempt.refused(process, "File too large", "Errno 27", "os error 27")
    attempt.completes()
    return int(full)


def read_only(attempt: Round) -> int:
    """Killed, then the folder cannot be written, then it can."""
    process = attempt.start()
    process.wait(attempt.moment())
    process.kill(signal.SIGKILL)
    process.finish()
    complete = process.status == 0
    if os.geteuid() == 0:
        with mounted(attempt.folder, "--bind", "-o", "ro", str(attempt.folder)):
            second = attempt.start()
            if not (complete and second.finish() == 0):
                attempt.refused(second, "Read-only file system", "read-only", "Errno 30", "os error 30")
    else:
        attempt.folder.chmod(0o555)
        second = attempt.start()
        second.finish()
        attempt.folder.chmod(0o755)
    attempt.completes()
    return 1


def two(attempt: Round) -> int:
    """Two processes in one folder at once: they share the work, or one of them is refused; then once more."""
    first, second = attempt.start(), attempt.start()
    statuses = sorted([first.finish(), second.finish()])
    if statuses != [0, 0]:
        if statuses != [0, 2]:
            raise Broken(f"status {statuses}:\n{first.said()[-1500:]}\n{second.said()[-1500:]}")
        attempt.refused(first if first.status else second, "Another run is writing")
    attempt.completes()
    return 1


def memory(attempt: Round) -> int:
    """Tensors do not fit, from a random call on: larger batches are halved, or the command says so; then they fit."""
    owner, name = attempt.operation.out_of_memory or (None, "")
    original, calls, place = getattr(owner, name), [], attempt.random.randrange(4)

    def limited(self: object, *rest: object, **options: object) -> object:
        calls.append(1)
        rows = next((len(value) for value in (*rest, *options.values()) if isinstance(value, torch.Tensor)), 1)
        if len(calls) > place and rows > 1:
            raise attempt.random.choice([MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to …")])
        return original(self, *rest, **options)

    process = attempt.start(lambda: setattr(owner, name, limited))
    if process.finish() != 0:
        attempt.refused(process, "Memory is exhausted")
    attempt.completes()
    return 1


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    subprocess.run(["mount", *options, str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


FAULTS: dict[str, Callable[[Round], int | None]] = {
    "kill": kill,
    "terminate": terminate,
    "clock": clock,
    "disk": disk,
    "read-only": read_only,
    "damage": damage,
    "two runs": two,
    "memory": memory,
}


def measure(name: str, fault: str, rounds: int, models: Models, folder: Path, reference: "Reference") -> Outcome:
    """All rounds of an operation with a fault."""
    operation, outcome = OPERATIONS[name], Outcome()
    for number in range(rounds):
        generator = random.Random(f"{SEED} {name} {fault} {number}")
        place = folder / f"{name}-{fault}-{number}".replace(" ", "-")
        place.mkdir()
        attempt = Round(operation, models, place, reference.units, reference.seconds, generator)
        outcome.rounds += 1
        try:
            injected = FAULTS[fault](attempt)
            if injected is None:
                outcome.refused += 1
                outcome.injected += 1
                continue
            outcome.injected += injected
            found = operation.units(place)
        except Broken as error:
            outcome.problems.append(f"{name}, {fault}, round {number}: {error}")
            continue
        expected, actual = Counter(reference.units), Counter(found)
        outcome.lost += (expected - actual).total()
        outcome.duplicated += (actual - expected).total()
        outcome.correct += found == reference.units
        if found != reference.units:
            outcome.problems.append(f"{name}, {fault}, round {number}: another result than without the fault")
        shutil.rmtree(place)
    return outcome


@dataclass
class Reference:
    """Result and duration of an uninterrupted run."""

    units: list[str]
    seconds: float


def uninterrupted(name: str, models: Models, folder: Path) -> Reference:
    place = folder / f"{name}-reference"
    place.mkdir()
    attempt = Round(OPERATIONS[name], models, place, [], 0.0, random.Random(SEED))
    began = time.monotonic()
    attempt.completes()
    return Reference(OPERATIONS[name].units(place), time.monotonic() - began)


# ---- The server, which has no output but answers.


def serve(fault: str, rounds: int, models: Models, folder: Path) -> Outcome:
    """Clients repeat a request until it is answered; the server is killed or terminated, and started again."""
    texts = [f"{number} dogs are playing in the snow." for number in range(12)]
    expected: list[str] | None = None
    outcome = Outcome()
    for number in range(rounds + 1):  # the first without a fault
        generator = random.Random(f"{SEED} serve {fault} {number}")
        answers: dict[int, list[list[str]]] = {}
        server, url = start_server(models, folder / f"serve-{fault}-{number}.log")
        port = url.rsplit(":", 1)[1]
        stopped = threading.Event()

        def ask(client: int, url: str = url, answers: dict = answers, stopped: threading.Event = stopped) -> None:
            body = json.dumps({"q": texts, "source": "en", "target": "de"}).encode()
            while not stopped.is_set():
                try:
                    request = urllib.request.Request(f"{url}/translate", body, {"Content-Type": "application/json"})  # noqa: S310
                    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
                        answers.setdefault(client, []).append(json.load(answer)["translatedText"])
                        return
                except (OSError, ValueError):  # refused or cut off: the server has ended
                    time.sleep(0.02)

        clients = [threading.Thread(target=ask, args=(client,)) for client in range(6)]
        for client in clients:
            client.start()
        try:
            if number:
                time.sleep(generator.uniform(0, 0.3))
                outcome.rounds += 1
                outcome.injected += 1
                server.kill(signal.SIGKILL if fault == "kill" else signal.SIGTERM)
                status = server.finish()
                if fault == "terminate" and status != 0:
                    raise Broken(f"status {status} after SIGTERM:\n{server.said()[-2000:]}")
                server, _ = start_server(models, folder / f"serve-{fault}-{number}-again.log", port)
            for client in clients:
                client.join(LONGEST)
        except Broken as error:
            outcome.problems.append(f"serve, {fault}, round {number}: {error}")
            answers.clear()
        finally:
            stopped.set()
            server.kill(signal.SIGKILL)
            server.finish()
        if expected is None:
            expected = answers[0][0]
            continue
        outcome.lost += sum(client not in answers for client in range(6))
        outcome.duplicated += sum(len(found) - 1 for found in answers.values())
        outcome.correct += len(answers) == 6 and all(found == [expected] for found in answers.values())
    return outcome


def start_server(models: Models, log: Path, port: str = "0") -> tuple[Process, str]:
    command = ["serve", "--model", str(models.student), "--source", "en", "--target", "de", "--port", port]
    server = start([*command, "--threads", "1"], log)
    deadline = time.monotonic() + LONGEST
    while "Listening on " not in server.said() if log.exists() else True:
        if server.wait(0) is not None or time.monotonic() > deadline:
            raise Broken(f"the server did not start:\n{server.said()}")
        time.sleep(0.01)
    return server, server.said().split("Listening on ")[1].split()[0]


SERVED = ("kill", "terminate")


# What `make test` runs.
QUICK = [
    *(("translate", fault) for fault in ("kill", "disk", "read-only", "damage", "memory")),
    *(("distill", fault) for fault in ("kill", "clock", "two runs")),
    *(("train", fault) for fault in ("kill", "damage")),
    ("energy", "kill"),
    ("serve", "kill"),
]


def run(chosen: list[tuple[str, str]], rounds: int, folder: Path) -> dict[tuple[str, str], Outcome]:
    """Measure operations with faults, of which those are left out that do not apply to an operation."""
    models_folder = folder / "models"
    models_folder.mkdir()
    models, outcomes = Models(models_folder), {}
    line_translation.BATCHES_OF_A_CHUNK = 4  # so that the lines are several chunks
    references: dict[str, Reference] = {}
    for name, fault in chosen:
        if name == "serve":
            if fault in SERVED:
                outcomes[name, fault] = serve(fault, rounds, models, folder)
        elif fault != "memory" or OPERATIONS[name].out_of_memory is not None:
            if name not in references:
                references[name] = uninterrupted(name, models, folder)
            outcomes[name, fault] = measure(name, fault, rounds, models, folder, references[name])
        print(f"{name}, {fault}: done", file=sys.stderr, flush=True)
    return outcomes


def table(outcomes: dict[tuple[str, str], Outcome]) -> str:
    lines = ["| operation | fault | rounds | faults | lost | duplicated | same result | refused by name |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for (operation, fault), found in outcomes.items():
        cells = [found.rounds, found.injected, found.lost, found.duplicated, found.correct, found.refused]
        lines.append(f"| {operation} | {fault} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*OPERATIONS, "serve"]
    parser.add_argument("--rounds", type=int, default=5, help="Rounds of every operation with every fault.")
    parser.add_argument("--operations", nargs="+", choices=names, default=names)
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--quick", action="store_true", help="One round of a selection, as in the tests.")
    options = parser.parse_args(arguments)
    chosen = [(name, fault) for name in options.operations for fault in options.faults]
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        outcomes = run(QUICK if options.quick else chosen, 1 if options.quick else options.rounds, Path(folder))
    print(table(outcomes))
    problems = [problem for found in outcomes.values() for problem in found.problems]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
