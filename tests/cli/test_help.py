"""`--help`: fast, complete, and in one style."""

import re
import subprocess
import sys
from dataclasses import fields
from typing import get_type_hints

import pytest

from hf_deqnar.benchmarks.options import MemoryOptions
from hf_deqnar.cli import bench
from hf_deqnar.cli.command import import_dataclass
from hf_deqnar.cli.main import VERBS, main
from hf_deqnar.cli.translate import GENERATION, TranslationArguments
from hf_deqnar.models.deqnar.configuration_deqnar import PRESETS
from hf_deqnar.models.deqnar.generation_config_deqnar import Options
from hf_deqnar.utils.source_dataclasses import read_dataclass

COMMANDS = [[name] for name in VERBS if name != "bench"] + [["bench", name] for name in bench.BENCHMARKS]
IMPORTED = sorted({kind for verb in VERBS.values() for kind in getattr(verb, "ARGUMENTS", ()) if isinstance(kind, str)})


def help_of(arguments: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_help_imports_neither_torch_nor_transformers():
    """Importing them takes seconds. In a separate process, because this one has imported them."""
    script = (
        "import sys\n"
        "from hf_deqnar.cli.main import main\n"
        f"for arguments in {[[], ['bench'], *COMMANDS]}:\n"
        "    try:\n"
        "        main([*arguments, '--help'])\n"
        "    except SystemExit as stopped:\n"
        "        assert stopped.code == 0\n"
        "    slow = {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)\n"
        "    assert not slow, (arguments, slow)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: hf-deqnar") == len(COMMANDS) + 2


def test_help_lists_every_verb(capsys):
    text = help_of([], capsys)
    assert all(re.search(rf"^    {name}\b", text, flags=re.MULTILINE) for name in VERBS)


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_flags_have_one_style_and_a_help_text(arguments, capsys):
    text = help_of(arguments, capsys).partition("\noptions:\n")[2]
    flags = re.findall(r"^  (--\S+)", text, flags=re.MULTILINE)
    assert flags
    assert not [flag for flag in flags if "-" in flag[2:]]
    for flag in flags:  # the help text follows on the same line or on the next
        assert re.search(rf"^  {flag}\b.*(  |\n {{10,}})\S", text, flags=re.MULTILINE), flag


@pytest.mark.parametrize("name", IMPORTED)
def test_flags_read_from_the_source_are_those_of_the_dataclass(name):
    pytest.importorskip("accelerate", reason="accelerate is part of the train extra")
    read = {entry.name: entry for entry in fields(read_dataclass(*name.split(":")))}
    assert read
    imported = import_dataclass(name)
    types = get_type_hints(imported)  # HfArgumentParser changes the types of fields
    for entry in fields(imported):
        if entry.name in read:
            found = read.pop(entry.name)
            assert (found.type, found.default, found.default_factory) == (
                types[entry.name],
                entry.default,
                entry.default_factory,
            )
            assert found.metadata["help"] == entry.metadata["help"]
    assert not read


def test_help_all_lists_the_flags_of_transformers(capsys):
    pytest.importorskip("accelerate", reason="accelerate is part of the train extra")
    assert "--gradient_accumulation_steps" not in help_of(["train"], capsys)
    with pytest.raises(SystemExit):
        main(["train", "--help_all"])
    text = capsys.readouterr().out
    assert all(flag in text for flag in ("--preset", "--objective", "--gradient_accumulation_steps"))


def test_generation_flags_are_options_of_generate():
    assert set(GENERATION) <= {option.name for option in fields(Options)}
    assert set(GENERATION) <= {argument.name for argument in fields(TranslationArguments)}


def test_presets_of_the_benchmarks_are_those_of_the_configuration():
    preset = next(entry for entry in fields(MemoryOptions) if entry.name == "preset")
    assert preset.type.__args__ == tuple(PRESETS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "hf-deqnar: the following arguments are required: verb"),
        (["tranlsate"], "hf-deqnar: argument verb: invalid choice: 'tranlsate'"),
        (["bench"], "hf-deqnar bench: the following arguments are required: verb"),
        (["bench", "sovler"], "hf-deqnar bench: argument verb: invalid choice: 'sovler'"),
        (["evaluate", "model"], "hf-deqnar evaluate: the following arguments are required: --data, --source, --target"),
        (["translate", "--batch_size", "x"], "hf-deqnar translate: argument --batch_size: invalid int value: 'x'"),
        (["translate", "--colour", "red"], "hf-deqnar translate: '--colour' is not understood; --help lists"),
        (["ngrams", "absent.yaml"], "hf-deqnar ngrams: There is no settings file absent.yaml."),
    ],
)
def test_a_wrong_command_line_is_one_readable_line(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert len(error.strip().splitlines()) == 1
