"""`experiments/run.py`: executed by real commands, interrupted and resumed; errors are reported before training."""

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
import release
import run as script
import yaml
from experiment import VERBS, check_recipe, read_experiment
from run import CommandError, main

from hf_deqnar.cli.main import main as hf_deqnar

from ..conftest import SENTENCES

pytest.importorskip("sacrebleu", reason="sacrebleu is part of the train extra")

FOLDER = Path(__file__).parents[2] / "experiments"
SCRIPT = FOLDER / "run.py"
RECIPES = sorted(FOLDER.glob("*.yaml"))

QUICK = {"train_data": "{data}/train.jsonl", "source": "en", "target": "de", "max_steps": 4, "save_steps": 1}
QUICK |= {"max_tokens": 200, "warmup_steps": 1, "report_to": "none", "disable_tqdm": True, "logging_steps": 1}
SMALL = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_layers": 1, "decoder_layers": 1}
ABOUT = {"title": "Dogs and horses", "dataset": "Six Sentences", "licence": "cc-by-2.0"}
ABOUT |= {"attribution": "Sentences of the tests.", "limits": "Knows six sentences."}
RECIPE = {
    "test": "{data}/test.jsonl",
    "source": "en",
    "target": "de",
    "defaults": {
        "teacher": {**QUICK, "vocab_size": 300, "config": SMALL},
        "train": {**QUICK, "teacher": "{teacher}", "train_data": "{distilled}"},
    },
    "runs": {
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
def arguments_for(tmp_path):
    """A corpus, and a function that writes a recipe and returns the arguments to run it."""
    for name in ("train", "test"):
        rows = [json.dumps({"en": source, "de": target}) for source, target in SENTENCES]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")

    def write(content: dict, *flags: str) -> list[str]:
        file = tmp_path / "experiment.yaml"
        file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        return [str(file), "--data", str(tmp_path), "--output", str(tmp_path / "out"), *map(str, flags)]

    return write


@pytest.fixture
def in_process(monkeypatch):
    """Execute the commands of runs in this process, which is faster; returns the calls."""
    called = []

    def command(experiment, run, arguments, processes=1):
        called.append((run.name, arguments[0]))
        if hf_deqnar(arguments):
            raise CommandError("it failed")

    monkeypatch.setattr(script, "command", command)
    return called


def changed(path: str, value) -> dict:
    """The recipe with one entry changed: 'runs/stacked/verb'."""
    content = copy.deepcopy(RECIPE)
    *parents, last = path.split("/")
    entry = content
    for parent in parents:
        entry = entry[parent]
    entry[last] = value
    return content


@pytest.mark.slow
def test_an_experiment_resumes_after_it_was_killed(arguments_for, tmp_path):
    arguments = arguments_for(RECIPE, "--only", "implicit")
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
    assert "Resuming from" in (out / "implicit.log").read_text() or "checkpoint-4" in os.listdir(out / "implicit")
    figures = json.loads((out / "implicit.json").read_text())
    assert figures["updates"] == 4
    assert figures["cpu_seconds"] > 0
    assert set(figures["decodings"]) == {"", "max_nfe=1", "max_nfe=3"}
    assert figures["decodings"]["max_nfe=1"]["mean_nfe"] == 1
    assert figures["decodings"][""]["bleu_signature"].startswith("nrefs:1|case:mixed")
    assert not (out / "stacked").exists()


@pytest.mark.slow
def test_two_processes_execute_one_run(arguments_for, tmp_path):
    flags = ("--only", "stacked", "--processes", "2")
    command = [sys.executable, SCRIPT, *arguments_for(RECIPE, *flags)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    settings = json.loads((tmp_path / "out" / "stacked" / "run.json").read_text())
    assert settings["processes"] == 2
    figures = json.loads((tmp_path / "out" / "stacked.json").read_text())
    assert figures["updates"] == 4
    assert figures["cpu_seconds"] > 0


@pytest.mark.slow
def test_an_error_in_one_of_two_processes_is_reported(arguments_for, tmp_path):
    content = changed("defaults/teacher/max_tokens", 3)
    command = [sys.executable, SCRIPT, *arguments_for(content, "--only", "teacher", "--processes", "2")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "teacher failed: hf-deqnar teacher: " in done.stderr


def test_models_that_only_have_figures_are_trained_again_when_needed(arguments_for, in_process, capsys, tmp_path):
    out = tmp_path / "out"
    assert main(arguments_for(RECIPE, "--only", "stacked")) == 0
    capsys.readouterr()
    assert main(arguments_for(RECIPE, "--only", "stacked", "--table")) == 0
    table = capsys.readouterr().out
    figures = {file.name: file.read_bytes() for file in out.glob("*.json") if "statistics" not in file.name}
    shutil.rmtree(out)
    out.mkdir()
    for name, content in figures.items():
        (out / name).write_bytes(content)
    in_process.clear()
    assert main(arguments_for(RECIPE, "--only", "stacked")) == 0
    assert in_process == []
    assert main(arguments_for(RECIPE, "--only", "stacked", "--table")) == 0
    assert capsys.readouterr().out == table
    assert main(arguments_for(RECIPE, "--only", "implicit")) == 0
    verbs = [(name, verb) for name, verb in in_process if verb != "evaluate"]
    assert verbs == [("teacher", "teacher"), ("distilled", "distill"), ("implicit", "train")]
    shutil.rmtree(out / "teacher")
    in_process.clear()
    assert main(arguments_for(changed("runs/implicit/curve", [1, 2, 3]), "--only", "implicit")) == 0
    assert in_process == [("implicit", "evaluate")]  # its model exists, so no other is needed
    arguments = arguments_for({**RECIPE, "about": ABOUT})
    assert release.main([*arguments, "--run", "stacked", "--to", str(tmp_path / "to")]) == 2
    assert "Run 'stacked' has figures but no model; remove" in capsys.readouterr().err


def test_finished_runs_are_tabulated_and_not_repeated(arguments_for, in_process, capsys, tmp_path):
    assert main(arguments_for(RECIPE)) == 0
    assert [verb for name, verb in in_process if name == "stacked.seed2"] == ["train", "evaluate"]
    for name in ("stacked", "stacked.seed2"):
        settings = json.loads((tmp_path / "out" / f"{name}.json").read_text())["settings"]
        assert settings["seed"] == (2 if name.endswith("2") else 1)
    in_process.clear()
    capsys.readouterr()
    more = changed("runs/implicit/decode", {"": {}, "beam": {"ctc_beam_size": 3}})
    more["runs"]["never"] = {"like": "implicit", "title": "another"}
    assert main(arguments_for(more, "--only", "implicit")) == 0
    assert in_process == [("implicit", "evaluate")]  # of the new decoding
    capsys.readouterr()
    assert main(arguments_for(more, "--table", "--plot", tmp_path / "curves.png")) == 0
    rows = capsys.readouterr().out.splitlines()
    names = [row.split("|")[1].strip() for row in rows[2:] if row.startswith("|")]
    assert names == ["the teacher, greedy", "stacked", "implicit", "implicit, beam", "another", "another, beam"]
    assert rows[3].count("(") == 1  # the mean and both seeds
    assert "not run" in rows[6]
    assert "not run" not in rows[5]
    assert rows[-1].startswith("BLEU nrefs:1|case:mixed")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert main(arguments_for(more, "--only", "implicit", "teacher", "--table")) == 0
    single = capsys.readouterr().out.splitlines()
    assert [row.split("|")[1].strip() for row in single[2:5]] == ["the teacher, greedy", "implicit", "implicit, beam"]
    assert not single[5]  # other runs that implicit needs are not shown
    assert main(arguments_for(changed("runs/implicit/settings", {"config": {"memory": 3}}))) == 2
    error = capsys.readouterr().err
    assert "The results of run 'implicit' belong to another recipe (config was" in error
    other = changed("runs/teacher/decode", {"greedy": {"num_beams": 2, "max_length": 9}})
    assert main(arguments_for(other, "--only", "teacher", "--table")) == 0
    assert "not run" in capsys.readouterr().out  # the figures belong to other options under the same name
    assert main(arguments_for(changed("defaults/teacher/max_steps", 5), "--only", "stacked", "--table")) == 2
    assert "The results of run 'teacher' belong to another recipe (max_steps was 4 and is 5)" in capsys.readouterr().err


def test_sizes_are_checked_with_those_of_the_preset(arguments_for, capsys):
    """100 is a multiple of the four heads of the tiny preset, but not of the eight heads of the default."""
    content = changed("runs/stacked/settings/config", {"d_model": 100, "length": "ctc"})
    content["runs"]["stacked"]["settings"] |= {"teacher": None, "preset": "tiny"}
    assert main(arguments_for(content, "--only", "teacher", "--table")) == 0, capsys.readouterr().err
    content["runs"]["stacked"]["settings"]["config"]["d_model"] = 101
    assert main(arguments_for(content, "--only", "teacher", "--table")) == 2
    assert "run 'stacked': d_model=101 is not a multiple of" in capsys.readouterr().err


def test_a_failed_run_does_not_stop_independent_runs(arguments_for, in_process, capsys, tmp_path):
    content = changed("runs/stacked/settings/tokenizer", "nowhere")
    content["runs"]["implicit"] = {"verb": "train", "settings": {"backbone": "{stacked}", "teacher": None}}
    assert main(arguments_for(content)) == 1
    error = capsys.readouterr().err
    assert "not run: stacked (it failed)" in error
    assert "not run: implicit (it needs a run that failed)" in error
    assert (tmp_path / "out" / "distilled.json").is_file()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("extra", 1, "'extra' is not a key; the keys are test"),
        ("runs/stacked/objective", "ctc", "run 'stacked': 'objective' is not a key"),
        ("runs/stacked/settings/lerning_rate", 1, "run 'stacked': settings: 'lerning_rate' is not a setting"),
        ("runs/stacked/settings/config", {"refinment": "x"}, "run 'stacked': config 'refinment' is not a field"),
        ("runs/stacked/settings/teacher", "{tutor}", "run 'stacked' needs {tutor}, but no run above it"),
        ("runs/stacked/settings/backbone", "{implicit}", "run 'stacked' needs {implicit}, but no run above it"),
        ("runs/stacked/verb", "learn", "run 'stacked': verb 'learn' is unknown; choose one of teacher"),
        ("runs/implicit/like", "missing", "run 'implicit' is like 'missing', but there is no such run"),
        ("runs/implicit/like", "implicit", "run 'implicit' is like itself"),
        ("runs/distilled/curve", [1], "run 'distilled': a corpus is not decoded"),
        ("about", "Tatoeba", "about must consist of name: value entries"),
        ("about", {**ABOUT, "license": "mit"}, "about: 'license' is not a key; the keys are title, dataset, licence"),
        ("about", {"title": "A model"}, "about: 'dataset' is missing"),
        ("about", {**ABOUT, "licence": 2.0}, "about: 'licence' must be a text, not 2.0"),
        ("about", {**ABOUT, "limits": " "}, "about: 'limits' must be a text, not ' '"),
        ("runs/data", {"verb": "train"}, "'data' cannot be the name of a run"),
        ("runs/stacked/title", "the teacher", "runs 'teacher' and 'stacked' have the same title"),
        ("runs/teacher/decode", {"beam 5": 5}, "run 'teacher': decode must map names to options of generate"),
        ("runs/stacked/decode", {"x": {"lenght_beams": 5}}, "'stacked': lenght_beams is not an option of generate"),
        ("runs/stacked/settings/config", {"tol": "much"}, "run 'stacked': "),
        ("runs/stacked/settings/objective", "glat", "'stacked': objective 'glat' needs config.length = 'predict'"),
        (
            "runs/stacked/settings/max_steps",
            "many",
            "run 'stacked': argument --max_steps: invalid int",
        ),
        ("runs/stacked/seeds", 42, "run 'stacked': seeds must be a list of integers of at least 0"),
        ("runs/stacked/seeds", [], "run 'stacked': seeds must be a list of integers of at least 0"),
        ("runs/implicit/curve", 4, "run 'implicit': curve must be a list of integers of at least 1"),
        ("defaults", [1], "defaults must consist of name: value entries"),
        ("defaults/distil", {"num_beams": 1}, "defaults: 'distil' is not a key; the keys are teacher, distill, train"),
        ("defaults/distill", ["num_beams"], "defaults of 'distill' must consist of name: value entries"),
        ("runs/stacked/settings", ["objective"], "settings of run 'stacked' must consist of name: value entries"),
        ("runs/stacked.seed2", {"verb": "train"}, "'stacked.seed2' is both a run and a seed of another run"),
        ("runs", ["teacher"], "runs must consist of name: value entries"),
    ],
)
def test_an_error_in_the_recipe_is_reported_first(arguments_for, in_process, capsys, path, value, message):
    assert main(arguments_for(changed(path, value))) == 2
    assert message in capsys.readouterr().err
    assert in_process == []


def test_missing_files_and_runs_are_reported(arguments_for, capsys, tmp_path):
    assert main(arguments_for(RECIPE, "--only", "stakced")) == 2
    assert "There is no run 'stakced'; the runs are teacher, distilled, stacked" in capsys.readouterr().err
    assert main(arguments_for(RECIPE, "--data", tmp_path / "none")) == 2
    assert "--data names the folder of the experiment's corpus" in capsys.readouterr().err
    assert main([str(tmp_path / "none.yaml"), "--data", str(tmp_path), "--output", str(tmp_path)]) == 2
    assert "There is no experiment" in capsys.readouterr().err
    arguments = arguments_for(RECIPE)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "teacher.json").write_text("{")
    assert main(arguments) == 2
    assert "teacher.json is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_of_the_repository_are_valid(path, tmp_path):
    experiment = read_experiment(path, tmp_path, tmp_path)
    assert {run.verb for run in experiment.runs.values()} <= set(VERBS)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_results_of_the_repository_belong_to_their_recipes(path, tmp_path):
    experiment = read_experiment(path, tmp_path, path.with_suffix(""))
    results = {file.name.removesuffix(".json") for file in path.with_suffix("").glob("*.json")}
    results = {name for name in results if not name.endswith(".statistics")}
    assert results
    for name in results:
        run, figures = experiment.runs[name], experiment.figures(name)
        check_recipe(experiment, run)
        assert figures["name"] == name
        own = str(experiment.result(name).relative_to(FOLDER.parent))
        assert figures["settings"].get("output_dir", figures["settings"].get("output")) == own
        assert {decoding["system"].partition(",")[0] for decoding in figures["decodings"].values()} <= {own}


def test_run_names_may_contain_any_letters(arguments_for, in_process, capsys):
    content = copy.deepcopy(RECIPE)
    content["runs"] = {
        "größe": content["runs"]["teacher"],
        "distilled": {**content["runs"]["distilled"]},
    }
    content["runs"]["distilled"]["settings"] |= {"teacher": "{größe}"}
    assert main(arguments_for(content, "--only", "distilled")) == 0, capsys.readouterr().err
    assert ("größe", "teacher") in in_process
    content["runs"][1] = {"verb": "train"}
    assert main(arguments_for(content)) == 2
    assert "1 cannot be the name of a run; use letters" in capsys.readouterr().err


def test_several_teachers_may_distil_one_corpus(arguments_for, in_process, tmp_path, capsys):
    content = copy.deepcopy(RECIPE)
    settings = content["runs"]["distilled"]["settings"]
    content["runs"]["other"] = {
        "verb": "teacher",
        "settings": {"tokenizer": "{teacher}", "vocab_size": None, "seed": 2},
    }
    content["runs"]["candidates"] = {"verb": "distill", "settings": settings | {"teacher": ["{teacher}", "{other}"]}}
    assert main(arguments_for(content, "--only", "candidates")) == 0, capsys.readouterr().err
    assert ("candidates", "distill") in in_process
    figures = json.loads((tmp_path / "out" / "candidates.json").read_text())
    assert [of_one["sentences"] for of_one in figures["statistics"].values()] == [len(SENTENCES)] * 2


def test_ngrams_and_shortlists_can_be_runs(arguments_for, in_process, tmp_path, capsys):
    content = copy.deepcopy(RECIPE)
    settings = {"model": "{implicit}", "data": ["{distilled}", "{data}/train.jsonl"], "source": "en", "target": "de"}
    (tmp_path / "train.jsonl").write_text((tmp_path / "train.jsonl").read_text() * 4, encoding="utf-8")
    content["runs"]["trigrams"] = {"verb": "ngrams", "title": "with n-grams", "settings": settings}
    content["runs"]["shortlist"] = {"verb": "shortlist", "settings": {**settings, "model": "{trigrams}"}}
    arguments = arguments_for(content, "--only", "shortlist")
    assert main(arguments) == 0, capsys.readouterr().err
    assert {("trigrams", "ngrams"), ("shortlist", "shortlist")} <= set(in_process)
    config = json.loads((tmp_path / "out" / "shortlist" / "config.json").read_text())
    assert (config["ngram_order"], config["shortlist_size"]) == (3, 40)
    figures = json.loads((tmp_path / "out" / "trigrams.json").read_text())
    before = json.loads((tmp_path / "out" / "implicit.json").read_text())
    assert figures["parameters"] == before["parameters"], "n-grams are not parameters"
    assert figures["decodings"][""]["sentences"] == len(SENTENCES)
    (tmp_path / "out" / "trigrams.json").unlink()  # interrupted between the model and its figures
    assert main(arguments) == 0, capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "trigrams.json").read_text())["recipe"] == figures["recipe"]
    capsys.readouterr()
    assert main([*arguments, "trigrams", "--table"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "with n-grams" in line)
    assert [cell.strip() for cell in row.split("|")][-3:] == ["", "", ""]


def test_a_seed_continues_the_run_of_the_same_seed(arguments_for, tmp_path):
    content = copy.deepcopy(RECIPE)
    on = {"teacher": None, "backbone": "{stacked.seed}", "config": {"refinement": "implicit"}}
    decode = {"": {}, "reranked": {"reranker": "{stacked.seed}"}}
    content["runs"]["on"] = {"like": "stacked", "settings": on, "decode": decode, "seeds": [1, 2]}
    file, *_ = arguments_for(content)
    runs = read_experiment(Path(file), tmp_path, tmp_path / "out").runs
    for name, start in {"on": "{stacked}", "on.seed2": "{stacked.seed2}"}.items():
        assert runs[name].settings["backbone"] == start
        assert runs[name].settings["train_data"] == "{distilled}"
        assert runs[name].decode["reranked"]["reranker"] == start
    content["runs"]["on"]["seeds"] = [1, 3]
    file, *_ = arguments_for(content)
    with pytest.raises(ValueError, match=r"run 'on.seed3' needs \{stacked.seed3\}, but no run above it has that name"):
        read_experiment(Path(file), tmp_path, tmp_path / "out")
