"""A few hundred unusual inputs of every kind, and what counts as a failure."""

import random
import re
from contextlib import contextmanager

import pytest
from fuzz import TARGETS, Target, Wrong, main, require_finite, run


@pytest.mark.parametrize("name", TARGETS)
def test_unusual_inputs_are_accepted_or_refused_in_one_line(name):
    count = 100 if name == "configurations" else 250
    found = run(name, range(count), seed=20, seconds=10.0)
    assert not found.failures
    assert found.inputs == count
    assert found.errors < 0.95 * count  # not all inputs are refused


def run_on(function):
    """The outcome of three inputs of a target with this check."""

    @contextmanager
    def opened():
        yield function

    return run("test", range(3), 0, 0.2, Target(lambda random: random.randrange(10), opened))


def test_failures_are_what_they_should_be():
    def refuse(value):
        raise ValueError("no")

    def fail(value):
        raise KeyError(value)

    def decode(value):
        b"\xff".decode()

    def hang(value):
        while True:
            pass

    def backtrack(value):
        re.fullmatch("(a|aa)*b", "a" * 60)

    assert (run_on(refuse).errors, run_on(refuse).failures) == (3, [])
    for function, message in ((fail, "KeyError"), (decode, "UnicodeDecodeError")):
        assert [number for number, _ in run_on(function).failures] == [0, 1, 2]
        assert message in run_on(function).failures[0][1]
    for function in (hang, backtrack):
        assert run_on(function).failures[0] == (0, "took more than 0.2 seconds")
    assert "nan" in run_on(lambda value: require_finite("x", float("nan"))).failures[0][1]
    with pytest.raises(Wrong):
        require_finite("x", float("inf"))


def test_inputs_depend_on_target_seed_and_number_only(capsys):
    for target in TARGETS.values():
        assert repr(target.draw(random.Random("a"))) == repr(target.draw(random.Random("a")))
    assert main(["--targets", "csv", "markdown", "--inputs", "20"]) == 0
    table = capsys.readouterr().out
    assert re.search(r"^\| csv \| 20 \| \d+ \| 0 \|", table, re.MULTILINE)
    assert re.search(r"^\| markdown \| 20 \| 0 \| 0 \|", table, re.MULTILINE)
