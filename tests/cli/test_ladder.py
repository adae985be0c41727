"""`hf-deqnar ladder`: climbed by real commands, stopped and gone on with; mistakes are told before they cost hours."""

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from hf_deqnar.cli import ladder as module
from hf_deqnar.cli.main import main

from ..conftest import SENTENCES

pytest.importorskip("sacrebleu", reason="sacrebleu is part of the train extra")

SCRIPT = Path(__file__).parents[2] / "scripts" / "ladder.py"
SHIPPED = sorted((Path(__file__).parents[2] / "ladders").glob("*.yaml"))

QUICK = {"train_data": "{data}/train.jsonl", "source": "en", "target": "de", "max_steps": 4, "save_steps": 1}
QUICK |= {"max_tokens": 200, "warmup_steps": 1, "report_to": "none", "disable_tqdm": True, "logging_steps": 1}
SMALL = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_layers": 1, "decoder_layers": 1}
ABOUT = {"title": "Dogs and horses", "dataset": "Six Sentences", "licence": "cc-by-2.0"}
ABOUT |= {"attribution": "Sentences by nobody in particular.", "limits": "Knows six sentences."}
LADDER = {
    "test": "{data}/test.jsonl",
    "source": "en",
    "target": "de",
    "defaults": {
        "teacher": {**QUICK, "vocab_size": 300, "config": SMALL},
        "train": {**QUICK, "teacher": "{teacher}", "train_data": "{distilled}"},
    },
    "rungs": {
        "teacher": {"verb": "teacher", "title": "the teacher", "decode": {"greedy": {"num_beams": 1, "max_length": 9}}},
        "distilled": {
            "verb": "distill",
            "settings": {"teacher": "{teacher}", "data": "{data}/train.jsonl", "source": "en", "target": "de"}
            | {"num_beams": 1, "max_length": 9},
        },
        "stacked": {
            "verb": "train",
            "settings": {"objective": "ctc", "config": {"refinement": "stacked", "length": "ctc"}},
            "seeds": [1, 2],
        },
        "implicit": {"like": "stacked", "settings": {"config": {"refinement": "implicit"}}, "curve": [1, 3]},
    },
}


@pytest.fixture
def house(tmp_path):
    """A corpus, and a function that writes a ladder and gives the arguments to climb it."""
    for name in ("train", "test"):
        rows = [json.dumps({"en": source, "de": target}) for source, target in SENTENCES]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")

    def write(content: dict, *flags: str) -> list[str]:
        file = tmp_path / "ladder.yaml"
        file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        return [str(file), "--data", str(tmp_path), "--output", str(tmp_path / "out"), *map(str, flags)]

    return write


@pytest.fixture
def in_process(monkeypatch):
    """Commands of rungs as calls, which saves the seconds of starting; returns what was called."""
    called = []

    def command(ladder, rung, arguments, processes=1):
        called.append((rung.name, arguments[0]))
        if main(arguments):
            raise module.ChildFailed("it failed")

    monkeypatch.setattr(module, "command", command)
    return called


def changed(path: str, value) -> dict:
    """The ladder with one entry changed: 'rungs/stacked/verb'."""
    content = copy.deepcopy(LADDER)
    *parents, last = path.split("/")
    entry = content
    for parent in parents:
        entry = entry[parent]
    entry[last] = value
    return content


@pytest.mark.slow
def test_a_ladder_is_climbed_by_commands_and_goes_on_after_a_kill(house, tmp_path):
    arguments = house(LADDER, "--only", "implicit")
    command = [sys.executable, SCRIPT, *arguments]
    first = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    while not (tmp_path / "out" / "implicit" / "checkpoint-1").is_dir() and first.poll() is None:
        time.sleep(0.05)
    assert first.poll() is None, first.stderr.read()
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    out = tmp_path / "out"
    assert (out / "distilled.json").is_file()
    assert not (out / "implicit.json").is_file()
    before = (out / "teacher.json").read_bytes()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "teacher:" not in done.stderr
    assert (out / "teacher.json").read_bytes() == before
    assert "Going on from" in (out / "implicit.log").read_text() or "checkpoint-4" in os.listdir(out / "implicit")
    figures = json.loads((out / "implicit.json").read_text())
    assert figures["updates"] == 4
    assert figures["cpu_seconds"] > 0
    assert set(figures["decodings"]) == {"", "max_nfe=1", "max_nfe=3"}
    assert figures["decodings"]["max_nfe=1"]["mean_nfe"] == 1
    assert figures["decodings"][""]["bleu_signature"].startswith("nrefs:1|case:mixed")
    assert not (out / "stacked").exists()


@pytest.mark.slow
def test_two_processes_share_a_rung(house, tmp_path):
    flags = ("--only", "stacked", "--processes", "2")
    command = [sys.executable, SCRIPT, *house(LADDER, *flags)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    settings = json.loads((tmp_path / "out" / "stacked" / "run.json").read_text())
    assert settings["processes"] == 2
    figures = json.loads((tmp_path / "out" / "stacked.json").read_text())
    assert figures["updates"] == 4
    assert figures["cpu_seconds"] > 0


@pytest.mark.slow
def test_what_failed_in_one_of_two_processes_is_said(house, tmp_path):
    content = changed("defaults/teacher/max_tokens", 3)
    command = [sys.executable, SCRIPT, *house(content, "--only", "teacher", "--processes", "2")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "teacher failed: hf-deqnar teacher: " in done.stderr


def test_figures_stand_without_their_models_until_these_are_needed(house, in_process, capsys, tmp_path):
    out = tmp_path / "out"
    assert main(["ladder", *house(LADDER, "--only", "stacked")]) == 0
    capsys.readouterr()
    assert main(["ladder", *house(LADDER, "--only", "stacked", "--table")]) == 0
    table = capsys.readouterr().out
    figures = {file.name: file.read_bytes() for file in out.glob("*.json") if "statistics" not in file.name}
    shutil.rmtree(out)
    out.mkdir()
    for name, content in figures.items():
        (out / name).write_bytes(content)
    in_process.clear()
    assert main(["ladder", *house(LADDER, "--only", "stacked")]) == 0
    assert in_process == []
    assert main(["ladder", *house(LADDER, "--only", "stacked", "--table")]) == 0
    assert capsys.readouterr().out == table
    assert main(["ladder", *house(LADDER, "--only", "implicit")]) == 0
    verbs = [(name, verb) for name, verb in in_process if verb != "evaluate"]
    assert verbs == [("teacher", "teacher"), ("distilled", "distill"), ("implicit", "train")]
    shutil.rmtree(out / "teacher")
    in_process.clear()
    assert main(["ladder", *house(changed("rungs/implicit/curve", [1, 2, 3]), "--only", "implicit")]) == 0
    assert in_process == [("implicit", "evaluate")]  # its model is there, so nothing else need be
    assert main(["release", *house({**LADDER, "about": ABOUT}), "--rung", "stacked", "--to", str(tmp_path / "to")]) == 1
    assert "Of rung 'stacked' there are figures but no model; remove" in capsys.readouterr().err


def test_rungs_seeds_and_decodings_are_tabulated_and_nothing_is_done_twice(house, in_process, capsys, tmp_path):
    assert main(["ladder", *house(LADDER)]) == 0
    assert [verb for name, verb in in_process if name == "stacked.seed2"] == ["train", "evaluate"]
    for name in ("stacked", "stacked.seed2"):
        settings = json.loads((tmp_path / "out" / f"{name}.json").read_text())["settings"]
        assert settings["seed"] == (2 if name.endswith("2") else 1)
    in_process.clear()
    capsys.readouterr()
    more = changed("rungs/implicit/decode", {"": {}, "beam": {"ctc_beam_size": 3}})
    more["rungs"]["never"] = {"like": "implicit", "title": "another"}
    assert main(["ladder", *house(more, "--only", "implicit")]) == 0
    assert in_process == [("implicit", "evaluate")]  # of the new decoding
    capsys.readouterr()
    assert main(["ladder", *house(more, "--table", "--plot", tmp_path / "curves.png")]) == 0
    rows = capsys.readouterr().out.splitlines()
    names = [row.split("|")[1].strip() for row in rows[2:] if row.startswith("|")]
    assert names == ["the teacher, greedy", "stacked", "implicit", "implicit, beam", "another", "another, beam"]
    assert rows[3].count("(") == 1  # both seeds beside their mean
    assert "not run" in rows[6]
    assert "not run" not in rows[5]
    assert rows[-1].startswith("BLEU nrefs:1|case:mixed")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert main(["ladder", *house(more, "--only", "implicit", "teacher", "--table")]) == 0
    alone = capsys.readouterr().out.splitlines()
    assert [row.split("|")[1].strip() for row in alone[2:5]] == ["the teacher, greedy", "implicit", "implicit, beam"]
    assert not alone[5]  # what implicit needs besides is not shown
    assert main(["ladder", *house(changed("rungs/implicit/settings", {"config": {"memory": 3}}))]) == 1
    said = capsys.readouterr().err
    assert "Rung 'implicit' was run by another recipe (config was" in said
    other = changed("rungs/teacher/decode", {"greedy": {"num_beams": 2, "max_length": 9}})
    assert main(["ladder", *house(other, "--only", "teacher", "--table")]) == 0
    assert "not run" in capsys.readouterr().out  # what was measured is another decoding of that name
    assert main(["ladder", *house(changed("defaults/teacher/max_steps", 5), "--only", "stacked", "--table")]) == 1
    assert "Rung 'teacher' was run by another recipe (max_steps was 4 and is 5)" in capsys.readouterr().err


def test_sizes_are_checked_beside_those_of_the_preset(house, capsys):
    """100 is no multiple of the eight heads that a model without a preset would have, but of tiny's four."""
    content = changed("rungs/stacked/settings/config", {"d_model": 100, "length": "ctc"})
    content["rungs"]["stacked"]["settings"] |= {"teacher": None, "preset": "tiny"}
    assert main(["ladder", *house(content, "--only", "teacher", "--table")]) == 0, capsys.readouterr().err
    content["rungs"]["stacked"]["settings"]["config"]["d_model"] = 101
    assert main(["ladder", *house(content, "--only", "teacher", "--table")]) == 1
    assert "rung 'stacked': d_model=101 is not a multiple of" in capsys.readouterr().err


def test_a_rung_that_fails_leaves_the_others_alone(house, in_process, capsys, tmp_path):
    content = changed("rungs/stacked/settings/tokenizer", "nowhere")
    content["rungs"]["implicit"] = {"verb": "train", "settings": {"backbone": "{stacked}", "teacher": None}}
    assert main(["ladder", *house(content)]) == 1
    said = capsys.readouterr().err
    assert "not run: stacked (it failed)" in said
    assert "not run: implicit (it needs a rung that failed)" in said
    assert (tmp_path / "out" / "distilled.json").is_file()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("extra", 1, "'extra' is not a key; there are test"),
        ("rungs/stacked/objective", "ctc", "rung 'stacked': 'objective' is not a key"),
        ("rungs/stacked/settings/lerning_rate", 1, "rung 'stacked': settings: 'lerning_rate' is not a setting"),
        ("rungs/stacked/settings/config", {"refinment": "x"}, "rung 'stacked': config 'refinment' is not a field"),
        ("rungs/stacked/settings/teacher", "{tutor}", "rung 'stacked' needs {tutor}, but no rung above"),
        ("rungs/stacked/settings/backbone", "{implicit}", "rung 'stacked' needs {implicit}, but no rung above"),
        ("rungs/stacked/verb", "learn", "rung 'stacked': verb 'learn' is unknown; choose one of teacher"),
        ("rungs/implicit/like", "nobody", "rung 'implicit' is like 'nobody', but there is no such rung"),
        ("rungs/implicit/like", "implicit", "rung 'implicit' is like itself"),
        ("rungs/distilled/curve", [1], "rung 'distilled': a corpus is not decoded"),
        ("about", "Tatoeba", "about must hold name: value entries"),
        ("about", {**ABOUT, "license": "mit"}, "about: 'license' is not a key; there are title, dataset, licence"),
        ("about", {"title": "A model"}, "about: 'dataset' is missing"),
        ("about", {**ABOUT, "licence": 2.0}, "about: 'licence' must be a text, not 2.0"),
        ("about", {**ABOUT, "limits": " "}, "about: 'limits' must be a text, not ' '"),
        ("rungs/data", {"verb": "train"}, "'data' cannot be a rung's name"),
        ("rungs/stacked/title", "the teacher", "rungs 'teacher' and 'stacked' have the same title"),
        ("rungs/teacher/decode", {"beam 5": 5}, "rung 'teacher': decode must hold options of generate by a name"),
        ("rungs/stacked/decode", {"x": {"lenght_beams": 5}}, "'stacked': lenght_beams is not an option of generate"),
        ("rungs/stacked/settings/config", {"tol": "much"}, "rung 'stacked': "),
        ("rungs/stacked/settings/objective", "glat", "'stacked': objective 'glat' needs config.length = 'predict'"),
        (
            "rungs/stacked/settings/max_steps",
            "many",
            "rung 'stacked': argument --max_steps/--max-steps: invalid int",
        ),
        ("rungs/stacked/seeds", 42, "rung 'stacked': seeds must be a list of whole numbers from 0 on"),
        ("rungs/stacked/seeds", [], "rung 'stacked': seeds must be a list of whole numbers from 0 on"),
        ("rungs/implicit/curve", 4, "rung 'implicit': curve must be a list of whole numbers from 1 on"),
        ("defaults", [1], "defaults must hold name: value entries"),
        ("defaults/distil", {"num_beams": 1}, "defaults: 'distil' is not a key; there are teacher, distill, train"),
        ("defaults/distill", ["num_beams"], "defaults of 'distill' must hold name: value entries"),
        ("rungs/stacked/settings", ["objective"], "settings of rung 'stacked' must hold name: value entries"),
        ("rungs/stacked.seed2", {"verb": "train"}, "'stacked.seed2' is the name of a rung and of another's seed"),
        ("rungs", ["teacher"], "rungs must hold name: value entries"),
    ],
)
def test_a_mistake_is_told_before_anything_runs(house, in_process, capsys, path, value, message):
    assert main(["ladder", *house(changed(path, value))]) == 1
    assert message in capsys.readouterr().err
    assert in_process == []


def test_missing_files_and_rungs_are_named(house, capsys, tmp_path):
    assert main(["ladder", *house(LADDER, "--only", "stakced")]) == 1
    assert "There is no rung 'stakced'; there are teacher, distilled, stacked" in capsys.readouterr().err
    assert main(["ladder", *house(LADDER, "--data", tmp_path / "none")]) == 1
    assert "--data is where the corpus" in capsys.readouterr().err
    assert main(["ladder", str(tmp_path / "none.yaml"), "--data", str(tmp_path), "--output", str(tmp_path)]) == 1
    assert "There is no ladder" in capsys.readouterr().err
    arguments = house(LADDER)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "teacher.json").write_text("{")
    assert main(["ladder", *arguments]) == 1
    assert "teacher.json is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_ladders_of_the_repository_are_sound(path, tmp_path):
    ladder = module.read_ladder(path, tmp_path, tmp_path)
    assert {rung.verb for rung in ladder.rungs.values()} <= set(module.VERBS)


def test_a_name_may_have_any_letters(house, in_process, capsys):
    content = copy.deepcopy(LADDER)
    content["rungs"] = {
        "größe": content["rungs"]["teacher"],
        "distilled": {**content["rungs"]["distilled"]},
    }
    content["rungs"]["distilled"]["settings"] |= {"teacher": "{größe}"}
    assert main(["ladder", *house(content, "--only", "distilled")]) == 0, capsys.readouterr().err
    assert ("größe", "teacher") in in_process
    content["rungs"][1] = {"verb": "train"}
    assert main(["ladder", *house(content)]) == 1
    assert "1 cannot be a rung's name; use letters" in capsys.readouterr().err


def test_several_teachers_may_distil_one_corpus(house, in_process, tmp_path, capsys):
    content = copy.deepcopy(LADDER)
    settings = content["rungs"]["distilled"]["settings"]
    content["rungs"]["other"] = {
        "verb": "teacher",
        "settings": {"tokenizer": "{teacher}", "vocab_size": None, "seed": 2},
    }
    content["rungs"]["candidates"] = {"verb": "distill", "settings": settings | {"teacher": ["{teacher}", "{other}"]}}
    assert main(["ladder", *house(content, "--only", "candidates")]) == 0, capsys.readouterr().err
    assert ("candidates", "distill") in in_process
    figures = json.loads((tmp_path / "out" / "candidates.json").read_text())
    assert [of_one["sentences"] for of_one in figures["statistics"].values()] == [len(SENTENCES)] * 2


def test_ngrams_and_shortlists_are_rungs_of_their_own(house, in_process, tmp_path, capsys):
    content = copy.deepcopy(LADDER)
    settings = {"model": "{implicit}", "data": ["{distilled}", "{data}/train.jsonl"], "source": "en", "target": "de"}
    (tmp_path / "train.jsonl").write_text((tmp_path / "train.jsonl").read_text() * 4, encoding="utf-8")
    content["rungs"]["fluent"] = {"verb": "ngrams", "title": "with n-grams", "settings": settings}
    content["rungs"]["quick"] = {"verb": "shortlist", "settings": {**settings, "model": "{fluent}"}}
    arguments = house(content, "--only", "quick")
    assert main(["ladder", *arguments]) == 0, capsys.readouterr().err
    assert {("fluent", "ngrams"), ("quick", "shortlist")} <= set(in_process)
    config = json.loads((tmp_path / "out" / "quick" / "config.json").read_text())
    assert (config["ngram_order"], config["shortlist_size"]) == (3, 40)
    figures = json.loads((tmp_path / "out" / "fluent.json").read_text())
    before = json.loads((tmp_path / "out" / "implicit.json").read_text())
    assert figures["parameters"] == before["parameters"], "what is counted is not a parameter"
    assert figures["decodings"][""]["sentences"] == len(SENTENCES)
    (tmp_path / "out" / "fluent.json").unlink()  # cut off between the model and its figures
    assert main(["ladder", *arguments]) == 0, capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "fluent.json").read_text())["recipe"] == figures["recipe"]
    capsys.readouterr()
    assert main(["ladder", *arguments, "fluent", "--table"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "with n-grams" in line)
    assert [cell.strip() for cell in row.split("|")][-3:] == ["", "", ""]
