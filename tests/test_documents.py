"""The code blocks of README.md and docs/*.md run.

The blocks of a page run in order in one folder, with small models and data in place of those that the page assumes,
and with the values of `SMALL`, `ADDED` and `NAMES`. Every word that is not in these tables runs as it is written.
These commands are checked without running them: `pip` (the extras exist), `make` (the target exists), `torchrun` (its
flags are known, the script exists), `hf-deqnar push`, `serve` and `demo` (their flags are known).

A block that cannot run is marked by a comment on the line above it: `<!-- not run: the reason -->`.
"""

import contextlib
import gzip
import io
import re
import shlex
import shutil
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from cost_model import main as run_cost_model
from run import main as run_experiments
from transformers.utils import logging

from hf_deqnar.cli import demo, push, serve
from hf_deqnar.cli.main import main
from hf_deqnar.data.parallel_text import read_parallel
from hf_deqnar.data.tokenizer import train_tokenizer
from hf_deqnar.utils.arguments import parse_arguments

from .conftest import PAIRS_FILE, small_model
from .teachers import small_teacher

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LANGUAGES = ("python", "bash", "yaml", "text")

# What the commands of a page need and the page does not create.
NEEDED = {
    "install.md": ["my-model"],
    "translate.md": ["my-model"],
    "serve.md": ["my-model"],
    "evaluate.md": ["my-model", "runs/teacher"],
    "train.md": ["runs/stacked", "runs/cmlm", "runs/teacher"],
    "distil.md": ["runs/t5", "runs/nllb"],
    "engine.md": ["runs/teacher", "runs/cmlm"],
    "export.md": ["my-model", "runs/teacher"],
}
# Values of flags, of keys in YAML and of keyword arguments in Python.
SMALL = {
    "max_steps": "2",
    "eval_steps": "2",
    "save_steps": "2",
    "warmup_steps": "1",
    "pair_steps": "2",
    "grid_steps": "1",
    "train_limit": "8",
    "vocab_size": "400",
    "max_tokens": "400",
}
# Flags that are added to a verb.
TRAINING = ["--use_cpu", "true", "--report_to", "none", "--disable_tqdm", "true", "--max_length", "60"]
ADDED = {
    "train": TRAINING,
    "teacher": TRAINING,
    "energy": TRAINING,
    "distill": ["--max_length", "8"],
    "calibrate": ["--data", "train.jsonl.gz"],  # more pairs than validation.jsonl.gz has here
    "bench decoding": ["--sentences", "2"],
    "bench latency": ["--sentences", "2", "--lengths", "5", "--sentences_per_length", "1", "--export", "exported"],
    "bench throughput": ["--sentences", "2", "--batches", "2", "--export", "exported"],
}
SCRIPTS = {"experiments/run.py": run_experiments, "experiments/cost_model.py": run_cost_model}
# Verbs that do not end, or that need a network: their flags are checked.
PARSED = {"push": push.ARGUMENTS, "serve": serve.ARGUMENTS, "demo": demo.ARGUMENTS}
# Models of the Hub, and a prefix that would fill the eight tokens of `distill`.
NAMES = {
    "google-t5/t5-small": "runs/t5",
    "facebook/nllb-200-distilled-600M": "runs/nllb",
    "translate English to German: ": "de: ",
}


@dataclass(frozen=True)
class Block:
    """A fenced block, without its indentation."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str | None

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}, line {self.line}"


def blocks_of(page: Path, text: str | None = None) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8") if text is None else text
    fence = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
    for match in fence.finditer(text):
        before = text[: match.start()].rstrip("\n").rpartition("\n")[2].strip()
        reason = re.fullmatch(r"<!-- not run: (.+) -->", before)
        line = text.count("\n", 0, match.start()) + 1
        yield Block(page, line, match[2], textwrap.dedent(match[3]), reason and reason[1])


def commands_of(block: Block) -> Iterator[list[str]]:
    """The words of each command; a backslash at the end of a line continues it, and # begins a comment."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def reduced(words: list[str]) -> list[str]:
    """Flags with the values of `SMALL`, and the names of `NAMES`."""
    words = [NAMES.get(word, word).replace("s3://", "memory://") for word in words]  # tests/distillation/test_s3.py
    for index, word in enumerate(words[:-1]):
        if word.startswith("--"):
            words[index + 1] = SMALL.get(word[2:], words[index + 1])
    return words


def reduced_text(text: str) -> str:
    """The same for `key: value` of YAML and `key=value` of Python."""
    for key, value in SMALL.items():
        text = re.sub(rf"\b({key}(?:: |=))\d+\b", rf"\g<1>{value}", text)
    return text


def check_pip(words: list[str]) -> None:
    assert words[1] == "install"
    for word in words[2:]:
        name, extras = re.fullmatch(r"(\w+)(?:\[([\w,]+)\])?", word).groups()
        assert name == PROJECT["name"]
        for extra in (extras or "").split(",") if extras else []:
            assert extra in PROJECT["optional-dependencies"], f"{extra} is not an extra in pyproject.toml"


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for target in words[1:]:
        assert target in targets, f"Makefile has no target {target}"


def check_torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    known = get_args_parser().parse_args(words[1:])
    assert (ROOT / known.training_script).is_file(), f"there is no {known.training_script}"


def run_python(words: list[str]) -> str:
    """A script of experiments/ that prints tables, with the folder of the page as data."""
    run_script = SCRIPTS[words[1]]
    if run_script is run_experiments:
        assert "--table" in words, "only the printing of tables is fast enough to run"
    data, output = str(Path.cwd()), io.StringIO()
    words = [data if word.startswith("data/") else word for word in words[2:]]
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(output):
        assert run_script(words) == 0
    return output.getvalue()


@contextlib.contextmanager
def captured() -> Iterator[tuple[io.TextIOWrapper, io.TextIOWrapper]]:
    """Standard output and standard error of a command that runs in this process."""
    output, errors = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        yield output, errors
    for stream in (output, errors):
        stream.seek(0)


def run_hf_deqnar(words: list[str]) -> None:
    verb, *flags = words[1:]
    if verb in PARSED:
        parse_arguments(PARSED[verb], flags)
        return
    file = None
    if ">" in flags:
        *flags, _, file = flags
    added = ADDED.get(verb) or ADDED.get(" ".join([verb, *flags[:1]]), [])
    arguments = [verb, *reduced(flags), *added]
    with captured() as (output, errors):
        status = main(arguments)
    assert status == 0, f"hf-deqnar {' '.join(arguments)} has exit status {status}:\n{errors.read()[-2000:]}"
    if file is not None:
        Path(file).write_text(output.read(), encoding="utf-8")


def run_sbatch(words: list[str]) -> None:
    """`sbatch --array=0-1 --wrap COMMAND`: the tasks of an array one after another."""
    array, wrap, command = words[1:]
    last = int(re.fullmatch(r"--array=0-(\d+)", array)[1])
    assert wrap == "--wrap"
    for task in range(last + 1):
        names = {"ID": task, "MIN": 0, "MAX": last, "COUNT": last + 1}
        environment = {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in names.items()}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            run_hf_deqnar(shlex.split(command))


def run_command(words: list[str], page_text: str = "") -> None:
    checks = {"pip": check_pip, "make": check_make, "torchrun": check_torchrun, "hf-deqnar": run_hf_deqnar}
    checks["sbatch"] = run_sbatch
    if words[0] == "python":
        assert run_python(words).strip() in page_text, "the page does not show what this command prints"
    else:
        assert words[0] in checks, f"do not know how to check {words[0]}"
        checks[words[0]](words)


def run_block(block: Block, namespace: dict) -> None:
    if block.language == "python":
        exec(compile(reduced_text(block.text), block.place, "exec"), namespace)
    elif block.language == "yaml":
        Path("settings.yaml").write_text(reduced_text(block.text), encoding="utf-8")
    elif block.language == "bash":
        for words in commands_of(block):
            run_command(words, block.page.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with every model that pages assume. All have one tokenizer, as a teacher and its students must."""
    folder = tmp_path_factory.mktemp("models")
    pairs = read_parallel(PAIRS_FILE, "en", "de")
    tokenizer = train_tokenizer([text for pair in pairs for text in (pair.source, *pair.references)], vocab_size=400)

    def save(name: str, model, tokenizer=tokenizer) -> None:
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)

    fields = {"dtype": torch.float32, "vocab_size": len(tokenizer), "max_nfe": 2}
    save("my-model", small_model(length="ctc", **fields))
    save("runs/stacked", small_model(length="ctc", refinement="stacked", **fields))
    save("runs/cmlm", small_model(length="predict", objective="cmlm", **fields))
    positions = {"max_position_embeddings": 256}
    save("runs/teacher", small_teacher("marian", len(tokenizer), **positions))
    save("runs/t5", small_teacher("t5", len(tokenizer)))
    tokenizer.save_pretrained(folder / "languages")
    multilingual = type(tokenizer).from_pretrained(folder / "languages")
    multilingual.add_tokens(["deu_Latn"])
    save("runs/nllb", small_teacher("m2m100", len(multilingual), **positions), multilingual)
    return folder


@pytest.fixture
def page_folder(models, tmp_path, monkeypatch):
    """The working folder of a page: data, and the models that `NEEDED` lists."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    lines = PAIRS_FILE.read_text(encoding="utf-8").splitlines(keepends=True)
    for name, part in {"train": lines[:24], "validation": lines[24:28], "test": lines[28:32]}.items():
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(part)
    (tmp_path / "page.html").write_text("<p>I like <b>tea</b>.", encoding="utf-8")
    (tmp_path / "film.srt").write_text("1\n00:00:01,000 --> 00:00:02,000\nI like tea.\n", encoding="utf-8")
    (tmp_path / "guide.md").write_text("# {name}, I like tea.\n", encoding="utf-8")
    (tmp_path / "terms.tsv").write_text("train station\tHauptbahnhof\n", encoding="utf-8")
    (tmp_path / "corpus.en").write_text("I like tea.\nWhere is the train station?\n", encoding="utf-8")

    def make(page: Path) -> Path:
        for name in NEEDED.get(page.name, []):
            shutil.copytree(models / name, tmp_path / name)
        return tmp_path

    level = logging.get_verbosity()
    yield make
    logging.set_verbosity(level)  # the command line silences transformers for its process
    logging.enable_progress_bar()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_has_a_language(page):
    assert [block.place for block in blocks_of(page) if block.language not in LANGUAGES] == []
    assert page.read_text(encoding="utf-8").count("```") == 2 * len(list(blocks_of(page)))


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if "```" in page.read_text()], ids=lambda page: page.name)
def test_the_blocks_of_a_page_run_in_order(page, page_folder):
    page_folder(page)
    namespace = {"__name__": "__main__"}
    for block in blocks_of(page):
        if block.not_run is None:
            try:
                run_block(block, namespace)
            except (Exception, SystemExit) as error:
                raise AssertionError(f"{block.place}: {error}") from error


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("pip install 'hf_deqnar[no_extra]'", "no_extra is not an extra"),
        ("make no_target", "no target no_target"),
        ("torchrun --standalone scripts/no_script.py", "there is no scripts/no_script.py"),
        ("hf-deqnar no_verb", "no_verb"),
        ("hf-deqnar translate --no_flag 1 'I like tea.'", "no_flag"),
        ("hf-deqnar translate --model no-model 'I like tea.'", "no-model"),
        ("hf-deqnar push --model . --repo_id user/name --no_flag", "no_flag"),
        ("curl example.org", "do not know how to check curl"),
    ],
)
def test_a_wrong_command_is_noticed(command, message, page_folder):
    (words,) = commands_of(Block(ROOT / "README.md", 1, "bash", command, None))
    with pytest.raises((AssertionError, ValueError, SystemExit), match=message):
        run_command(words)


def test_wrong_python_is_noticed():
    with pytest.raises(ImportError, match="no_name"):
        run_block(Block(ROOT / "README.md", 1, "python", "from hf_deqnar import no_name", None), {})


def test_a_block_is_left_out_only_with_a_reason():
    page = "<!-- not run: needs a GPU -->\n```bash\nmake all\n```\n\ntext\n```python\n1 + 1\n```\n"
    first, second = blocks_of(ROOT / "README.md", page)
    assert (first.not_run, second.not_run) == ("needs a GPU", None)
