"""`--help`: fast, complete, and in one style."""

import ast
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

import hf_deqnar
from hf_deqnar.benchmarks.options import MemoryOptions
from hf_deqnar.cli import bench
from hf_deqnar.cli.command import import_dataclass
from hf_deqnar.cli.main import COMMANDS as VERB_COMMANDS
from hf_deqnar.cli.main import GROUPS, VERBS, main
from hf_deqnar.cli.translate import GENERATION, TranslationArguments
from hf_deqnar.models.deqnar.configuration_deqnar import PRESETS, DeqNarConfig
from hf_deqnar.models.deqnar.generation_config_deqnar import Options
from hf_deqnar.training.arguments import read_settings
from hf_deqnar.utils.arguments import ArgumentParser
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
        (["tranlsate"], "hf-deqnar: argument verb: invalid choice: 'tranlsate'; did you mean translate?"),
        (["xyz"], "hf-deqnar: argument verb: invalid choice: 'xyz' (choose from "),
        (["bench"], "hf-deqnar bench: the following arguments are required: verb"),
        (["bench", "sovler"], "hf-deqnar bench: argument verb: invalid choice: 'sovler'; did you mean solver?"),
        (["evaluate", "model"], "hf-deqnar evaluate: the following arguments are required: --data, --source, --target"),
        (["translate", "--batch_size", "x"], "hf-deqnar translate: argument --batch_size: invalid int value: 'x'"),
        (
            ["translate", "--bach-size=4"],
            "hf-deqnar translate: '--bach-size=4' is not understood; did you mean --batch",
        ),
        (["translate", "--colour", "red"], "hf-deqnar translate: '--colour' is not understood; --help lists"),
        (["ngrams", "absent.yaml"], "hf-deqnar ngrams: There is no settings file absent.yaml."),
    ],
)
def test_a_wrong_command_line_is_one_readable_line(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert len(error.strip().splitlines()) == 1


def test_without_a_verb_the_help_is_printed(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out == help_of([], capsys)


def test_every_group_of_verbs_has_an_example_that_is_parsed(capsys):
    text = help_of([], capsys)
    examples = re.findall(r"^    \$ hf-deqnar (.+)$", text, flags=re.MULTILINE)
    assert len(examples) == len(GROUPS)
    for title, (verbs, example) in GROUPS.items():
        assert f"\n{title}:\n" in text
        verb, *flags = shlex.split(example)
        assert verb in verbs
        _, unknown = ArgumentParser(VERB_COMMANDS[verb].dataclasses(flags)).parse_known_args(flags)
        assert unknown == []


def test_options_of_transformers_have_their_own_heading_after_ours(capsys):
    pytest.importorskip("accelerate", reason="accelerate is part of the train extra")
    with pytest.raises(SystemExit):
        main(["train", "--help_all"])
    ours, heading, theirs = capsys.readouterr().out.partition("\noptions of transformers:\n")
    assert heading
    for flag in ("--preset", "--objective", "--train_data"):
        assert f"\n  {flag} " in ours
        assert f"\n  {flag} " not in theirs
    assert "\n  --gradient_accumulation_steps " in theirs


def test_a_mistyped_setting_or_field_has_a_suggestion(tmp_path, capsys):
    (tmp_path / "settings.yaml").write_text("ordr: 3\n")
    assert main(["ngrams", str(tmp_path / "settings.yaml")]) == 2
    assert "'ordr' is not a setting; did you mean order? --help lists every one." in capsys.readouterr().err
    with pytest.raises(ValueError, match="config 'legnth' is not a field of DeqNarConfig; did you mean length?"):
        read_settings(["legnth=ctc"], DeqNarConfig)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("hf-deqnar tr", ["train", "translate"]),
        ("hf-deqnar translate --bat", ["--batch_size", "--batch-size"]),
        ("hf-deqnar bench so", ["solver "]),
        ("hf-deqnar translate --runtime o", ["onnx "]),
    ],
)
def test_the_shell_completes_verbs_flags_and_choices(line, expected, tmp_path):
    file = tmp_path / "completions"
    request = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(file), "COMP_LINE": line, "COMP_TYPE": "9"}
    request |= {"COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    command = [sys.executable, "-m", "hf_deqnar.cli.main"]
    subprocess.run(command, env={**os.environ, **request}, check=False, capture_output=True)
    assert sorted(file.read_text().split("\n")) == sorted(expected)


def test_progress_bars_are_only_shown_on_a_terminal():
    """`disable=None` shows a bar if its stream, by default stderr, is a terminal."""
    for file in Path(hf_deqnar.__file__).parent.rglob("*.py"):
        calls = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))
        for call in calls:
            if getattr(call.func, "id", None) == "tqdm":
                assert "disable" in {keyword.arg for keyword in call.keywords}, f"{file.name}, line {call.lineno}"
