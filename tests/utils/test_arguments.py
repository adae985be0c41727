from dataclasses import dataclass, field

import pytest

from hf_deqnar.utils.arguments import parse_arguments, parse_settings


@dataclass
class Positional:
    text: list[str] = field(default_factory=list, metadata={"positional": True, "nargs": "*", "help": "Texts."})
    output_dir: str | None = field(default=None, metadata={"aliases": ["--output"], "help": "A folder."})
    watch: bool = field(default=False, metadata={"help": "A switch."})
    pair: list[str] | None = field(default=None, metadata={"nargs": 2, "help": "Two names."})


@dataclass
class Settings:
    name: str = field(metadata={"help": "Required."})
    steps: int = field(default=5, metadata={"help": "A number."})
    use_cpu: bool = field(default=False, metadata={"help": "A switch that settings files set."})


def test_a_switch_before_a_positional_argument_does_not_read_it_as_its_value():
    (found,) = parse_arguments([Positional], ["--watch", "A man is riding a horse.", "true"])
    assert found == Positional(["A man is riding a horse.", "true"], watch=True)


@pytest.mark.parametrize("flag", ["--output_dir", "--output-dir", "--output"])
def test_hyphens_and_former_names_are_accepted(flag):
    assert parse_arguments([Positional], [flag, "out"]) == (Positional(output_dir="out"),)


def test_a_flag_with_two_values_leaves_the_rest_to_the_positional_arguments():
    (found,) = parse_arguments([Positional], ["--pair", "a", "b", "c"])
    assert found == Positional(["c"], pair=["a", "b"])


def test_a_settings_file_is_overridden_by_flags(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("name: first\nsteps: 7\nuse_cpu: true\n")
    assert parse_arguments([Settings], [str(file), "--steps", "9"]) == (Settings("first", 9, True),)
    assert parse_settings([Settings], {"name": "first", "use_cpu": True}) == (Settings("first", 5, True),)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: --name$"),
        (["--name", "a", "--steps", "x"], "argument --steps: invalid int value: 'x'"),
        (["--name", "a", "b"], "'b' is not understood"),
    ],
)
def test_errors_are_raised_and_name_one_spelling_of_the_flag(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse_arguments([Settings], arguments)
