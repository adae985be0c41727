"""`experiments/release.py`: the folder loads with and without the package, and its card is valid on the Hub."""

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from experiment import fingerprint, read_experiment
from huggingface_hub import ModelCard
from release import main
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

import hf_deqnar
from hf_deqnar.cli.main import main as command_line

from ..conftest import SENTENCES, small_model
from ..teachers import small_teacher
from .test_run import ABOUT, RECIPE

pytest.importorskip("sacrebleu", reason="sacrebleu is part of the train extra")

RERANKED = {"ctc_beam_size": 3, "reranker": "{teacher}"}
FINISHED = {**RECIPE, "about": ABOUT, "runs": copy.deepcopy(RECIPE["runs"])}
FINISHED["runs"]["teacher"]["decode"] = {"greedy": {"num_beams": 1}, "beam 5": {"num_beams": 5, "max_length": 9}}
FINISHED["runs"]["implicit"] |= {"title": "the student", "curve": []}
FINISHED["runs"]["implicit"]["decode"] = {"": {}, "beam": {"ctc_beam_size": 3, "tol": "1e-4"}, "reranked": RERANKED}
FINISHED["runs"]["later"] = {"like": "implicit", "decode": {"": {}}, "title": "not yet"}
FINISHED["runs"]["heavy"] = {"like": "implicit", "decode": {"": {}}, "title": "large weights"}
TRAINING = ("trainer_state.json", "training_args.bin", "optimizer.pt")
CODE = "modeling_deqnar.DeqNarForConditionalGeneration"


def figures(system: str, options: dict, bleu: float) -> dict:
    """Figures as `hf-deqnar evaluate` writes them."""
    signature = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"
    found = {"options": options, "system": system, "bleu": bleu, "bleu_signature": signature, "chrf": bleu + 20}
    found |= {"chrf_signature": "nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:2.6.0", "sentences": 1006}
    found |= {"length_ratio": 0.95}
    return found | ({"mean_nfe": 7.25, "share_converged": 0.99} if "implicit" in system else {})


@pytest.fixture(scope="module")
def finished(tokenizer, tmp_path_factory):
    """A function that returns the arguments of a release; the results of the experiment are written here."""
    folder = tmp_path_factory.mktemp("finished")
    output = folder / "out"
    models = {
        "teacher": small_teacher("marian", len(tokenizer)),
        "stacked": small_model(torch.float32, refinement="stacked", length="ctc", vocab_size=len(tokenizer)),
        "implicit": small_model(torch.float32, refinement="implicit", length="ctc", vocab_size=len(tokenizer)),
        "heavy": small_model(torch.float32, refinement="implicit", length="ctc", vocab_size=len(tokenizer)),
    }
    models["heavy"].lm_head.weight.data[9, 3] = 70000.0
    for name, model in models.items():
        model.save_pretrained(output / name)
        tokenizer.save_pretrained(output / name)
        for file in TRAINING:
            (output / name / file).write_text("{}")
    file = folder / "experiment.yaml"
    file.write_text(yaml.safe_dump(FINISHED, sort_keys=False), encoding="utf-8")
    experiment = read_experiment(file, folder, output)
    machine = {"processor": "an abacus", "threads": 2, "torch": "2.13.0", "transformers": "5.22.0"}
    for number, name in enumerate((*models, "distilled")):
        run = experiment.runs[name]
        decodings = {}
        for place, (key, options) in enumerate(run.decodings().items()):
            system = ",".join([str(output / name), *(f"{option}={value}" for option, value in options.items())])
            decodings[key] = figures(system, options, 30.0 + number + place / 8)
        known = {
            "name": name,
            "verb": run.verb,
            "recipe": fingerprint(experiment, run),
            "settings": experiment.settings(run),
        }
        known |= {"updates": 4, "cpu_seconds": 90.0, "parameters": 123456, "decodings": decodings, "machine": machine}
        (output / f"{name}.json").write_text(json.dumps(known))

    def arguments(run: str, to: Path, *flags: str, content: dict | None = None) -> list[str]:
        path = file
        if content is not None:
            path = to.parent / "changed.yaml"
            path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        where = [str(path), "--data", str(folder), "--output", str(output)]
        return [*where, "--run", run, "--to", str(to), *flags]

    arguments.output = output
    return arguments


def blocks(card: ModelCard) -> list[str]:
    return re.findall(r"```python\n(.*?)```", card.text, flags=re.DOTALL)


def test_a_release_contains_the_model_and_no_training_state(finished, tokenizer, tmp_path, capsys):
    to = tmp_path / "shelf" / "student"
    assert main(finished("implicit", to, "--decoding", "beam")) == 0
    assert capsys.readouterr().out.startswith(f"{to}: the student, beam; 0.")
    assert not set(TRAINING) & set(os.listdir(to))
    assert {"README.md", "model.safetensors", "tokenizer.json", "modeling_deqnar.py"} <= set(os.listdir(to))
    assert os.listdir(to.parent) == ["student"]
    before = AutoModelForSeq2SeqLM.from_pretrained(finished.output / "implicit").eval()
    after = AutoModelForSeq2SeqLM.from_pretrained(to).eval()
    for name, tensor in before.state_dict().items():
        assert torch.equal(tensor, after.state_dict()[name]), name
    assert torch.equal(AutoModel.from_pretrained(to).shared.weight, before.model.shared.weight)
    assert (after.generation_config.ctc_beam_size, after.generation_config.tol) == (3, 1e-4)
    assert AutoTokenizer.from_pretrained(to).get_vocab() == tokenizer.get_vocab()
    batch = tokenizer([english for english, _ in SENTENCES], return_tensors="pt", padding=True)
    assert torch.equal(after.generate(**batch), before.generate(**batch, ctc_beam_size=3, tol=1e-4))


@pytest.mark.parametrize("run", ["implicit", "teacher"])
def test_half_precision_is_stored_and_float32_is_loaded(finished, tmp_path, run):
    assert main(finished(run, tmp_path / "half", "--half")) == 0
    full, stored = (load_file(folder / "model.safetensors") for folder in (finished.output / run, tmp_path / "half"))
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "half")
    assert {tensor.dtype for tensor in loaded.state_dict().values()} == {torch.float32}
    for name, tensor in full.items():
        assert torch.equal(loaded.state_dict()[name], tensor.half().float()), name
    assert "measured before the weights were rounded" in (tmp_path / "half" / "README.md").read_text(encoding="utf-8")


def test_the_card_has_metadata_recipe_and_results(finished, tmp_path):
    assert main(finished("implicit", tmp_path / "student", "--decoding", "beam")) == 0
    card = ModelCard.load(tmp_path / "student" / "README.md")
    data = card.data.to_dict()
    assert (data["language"], data["license"], data["datasets"]) == (["en", "de"], "cc-by-2.0", ["six-sentences"])
    assert (data["pipeline_tag"], data["library_name"]) == ("translation", "transformers")
    assert data["tags"] == ["hf_deqnar", "non-autoregressive", "deep-equilibrium"]
    assert data["metrics"] == ["bleu", "chrf"]
    assert card.data.model_name == "student"
    values = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert values == {"bleu": 32.12, "chrf": 52.12}
    assert {result.dataset_name for result in card.data.eval_results} == {"Six Sentences"}
    assert card.data.eval_results[0].metric_args["signature"].startswith("nrefs:1|case:mixed")

    assert card.text.startswith("\n# Dogs and horses: the student\n")
    for text in (ABOUT["attribution"], ABOUT["limits"], "Licence of this model: cc-by-2.0.", "from `en` to `de`"):
        assert text in card.text
    steps = re.findall(r"\d\. `hf-deqnar (.*?)` with", card.text)
    assert steps == ["teacher teacher.yaml", "distill distilled.yaml", "train implicit.yaml"]
    settings = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", card.text, flags=re.DOTALL)[2])
    assert settings["train_data"] == "distilled.jsonl.gz"
    assert (settings["teacher"], settings["output_dir"]) == ("teacher", "implicit")
    assert str(finished.output.parent) not in card.content  # local folders are not published
    rows = [[cell.strip() for cell in row.split("|")[1:6]] for row in card.text.splitlines() if row.startswith("| the")]
    assert rows[0] == ["the teacher, greedy", "30.0", "50.0", "0.950", ""]
    assert rows[3] == ["the student, beam", "32.1", "52.1", "0.950", "7.2"]
    assert "The row 'the student, beam' is this model" in card.text
    assert "Measured on the 1,006 sentences of the test set of Six Sentences" in card.text


def test_the_examples_of_the_card_run_with_and_without_the_package(finished, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for run in ("implicit", "teacher"):
        assert main(finished(run, Path(run), "--half")) == 0
    expected = pipeline("translation", model="implicit")("Where is the train station?")
    with_package, without = blocks(ModelCard.load(Path("implicit/README.md")))
    capsys.readouterr()
    exec(with_package, {})
    assert capsys.readouterr().out == f"{expected}\n"
    environment = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    script = f"import sys; sys.modules['hf_deqnar'] = None\n{without}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(expected)
    card = ModelCard.load(Path("teacher/README.md"))
    assert card.data.tags == ["hf_deqnar", "marian"]
    for block in blocks(card):
        exec(block, {})
    answers = capsys.readouterr().out.splitlines()
    assert answers[0] == str([{"translation_text": eval(answers[1])[0]}])


def test_the_beams_of_a_teacher_are_saved(finished, tmp_path):
    assert main(finished("teacher", tmp_path / "teacher", "--decoding", "beam 5")) == 0
    config = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "teacher").generation_config
    assert (config.num_beams, config.max_length) == (5, 9)
    assert "one token after the other" in (tmp_path / "teacher" / "README.md").read_text(encoding="utf-8")
    assert not list((tmp_path / "teacher").glob("*.py"))


def test_the_bundled_model_has_links_to_the_code_of_the_package_and_is_used_by_default(
    finished, tmp_path, monkeypatch, capsys
):
    bundled = tmp_path / "bundled"
    monkeypatch.setattr(hf_deqnar, "PRETRAINED", str(bundled))
    assert main(finished("implicit", bundled, "--half")) == 0
    code = {file.name: file for file in bundled.glob("*.py")}
    assert "modeling_deqnar.py" in code
    for name, file in code.items():
        assert file.is_symlink()
        assert not Path(os.readlink(file)).is_absolute()
        assert file.resolve() == Path(hf_deqnar.__file__).parent / "models" / "deqnar" / name
    assert json.loads((bundled / "config.json").read_text())["auto_map"]["AutoModelForSeq2SeqLM"] == CODE
    capsys.readouterr()
    (block,) = blocks(ModelCard.load(bundled / "README.md"))
    exec(block, {})
    output = capsys.readouterr().out
    assert command_line(["translate", "Where is the train station?"]) == 0
    assert output == f"{[{'translation_text': capsys.readouterr().out.rstrip(chr(10))}]}\n"


@pytest.mark.parametrize(
    ("run", "flags", "message"),
    [
        ("missing", [], "There is no run 'missing'; the runs are teacher"),
        ("distilled", [], "Run 'distilled' makes a corpus; only models can be released"),
        ("later", [], "Run 'later' has no results: "),
        ("implicit", ["--decoding", "bean"], "Run 'implicit' has no decoding 'bean'; it has beam, reranked"),
        ("stacked", ["--decoding", "beam"], "has no decoding 'beam'; it has one without a name"),
        ("implicit", ["--decoding", "reranked"], "Decoding 'reranked' needs {teacher}, which is not part of a release"),
        ("heavy", ["--half"], "reaches 7e+04, too large for half precision; leave out --half"),
    ],
)
def test_runs_that_cannot_be_released_are_reported(finished, tmp_path, capsys, run, flags, message):
    assert main(finished(run, tmp_path / "release", *flags)) == 2
    output = capsys.readouterr().err
    assert message in output
    assert len(output.splitlines()) == 1
    assert os.listdir(tmp_path) == []


def test_a_changed_recipe_or_one_without_about_is_refused(finished, tmp_path, capsys):
    without_about = {key: value for key, value in FINISHED.items() if key != "about"}
    other = copy.deepcopy(FINISHED)
    other["defaults"]["teacher"]["max_steps"] = 5
    decoded = copy.deepcopy(FINISHED)
    decoded["runs"]["implicit"]["decode"]["beam"] = {"ctc_beam_size": 4}
    for content, message in [
        (without_about, "changed.yaml has no 'about', which gives the card its data and licence"),
        (other, "The results of run 'teacher' belong to another recipe (max_steps was 4 and is 5)"),
        (decoded, "Run 'implicit' is not evaluated with decoding 'beam'; run the experiment first"),
    ]:
        assert main(finished("implicit", tmp_path / "release", "--decoding", "beam", content=content)) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "release").exists()


def test_only_an_earlier_release_is_replaced_and_only_with_overwrite(finished, tmp_path, capsys):
    to = tmp_path / "release"
    to.mkdir()
    (to / ".gitattributes").write_text("kept")
    assert main(finished("implicit", to)) == 0  # hidden files are ignored
    assert main(finished("teacher", to)) == 2
    assert "contains an earlier release; --overwrite replaces it" in capsys.readouterr().err
    assert json.loads((to / "config.json").read_text())["auto_map"]["AutoModelForSeq2SeqLM"] == CODE
    save_file({}, to / "model-00002-of-00002.safetensors")
    (to / "plot.png").write_text("kept")
    assert main(finished("teacher", to, "--overwrite")) == 0
    assert json.loads((to / "config.json").read_text())["model_type"] == "marian"
    assert not list(to.glob("*.py"))
    assert not list(to.glob("model-*"))
    assert {".gitattributes", "plot.png"} <= set(os.listdir(to))
    (to / "README.md").write_text("# My own")
    assert main(finished("implicit", to, "--overwrite")) == 2
    assert "is not empty and does not contain a release; name another folder" in capsys.readouterr().err
    assert main(finished("implicit", to / "plot.png")) == 2
    assert "plot.png is a file; --to names a folder" in capsys.readouterr().err


def test_a_card_can_be_written_without_the_model(finished, tmp_path, capsys):
    file = tmp_path / "cards" / "student.md"
    arguments = finished("implicit", tmp_path / "unused", "--decoding", "beam")
    arguments[arguments.index("--to") : arguments.index("--to") + 2] = ["--card", str(file)]
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"{file}: the student, beam\n"
    assert os.listdir(tmp_path) == ["cards"]
    assert main(finished("implicit", tmp_path / "implicit", "--decoding", "beam")) == 0
    assert file.read_text(encoding="utf-8") == (tmp_path / "implicit" / "README.md").read_text(encoding="utf-8")

    assert main(arguments) == 2
    assert "student.md contains an earlier card; --overwrite replaces it" in capsys.readouterr().err
    assert main([*arguments, "--overwrite"]) == 0
    file.write_text("# My own", encoding="utf-8")
    assert main([*arguments, "--overwrite"]) == 2
    assert "was not generated by this script; name another file" in capsys.readouterr().err
    assert file.read_text(encoding="utf-8") == "# My own"
    arguments[arguments.index("--card") + 1] = str(tmp_path)
    assert main(arguments) == 2
    assert "is a folder; --card names a file" in capsys.readouterr().err
