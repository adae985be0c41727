"""The bundled model is installed, small, attributes its training data, and translates everyday English."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from transformers import pipeline

import hf_deqnar

PRETRAINED = Path(hf_deqnar.PRETRAINED)

# Acceptable translations; the model must produce one of them.
CORRECT = {
    "Where is the train station?": {"Wo ist der Bahnhof?"},
    "I would like a cup of coffee.": {
        "Ich hätte gern eine Tasse Kaffee.",
        "Ich hätte gerne eine Tasse Kaffee.",
        "Ich möchte eine Tasse Kaffee.",
        "Ich möchte gern eine Tasse Kaffee.",
        "Ich möchte gerne eine Tasse Kaffee.",
    },
    "My brother has lived in Berlin for three years.": {
        "Mein Bruder lebt seit drei Jahren in Berlin.",
        "Mein Bruder lebt schon seit drei Jahren in Berlin.",
        "Mein Bruder wohnt seit drei Jahren in Berlin.",
        "Mein Bruder wohnt schon seit drei Jahren in Berlin.",
    },
    "The weather is nice today, so we are going to the park.": {
        "Das Wetter ist heute schön, also gehen wir in den Park.",
        "Das Wetter ist heute schön, deshalb gehen wir in den Park.",
    },
    "Could you tell me where the bathroom is?": {
        "Könnten Sie mir sagen, wo das Badezimmer ist?",
        "Könntest du mir sagen, wo das Badezimmer ist?",
    },
    "Why didn't you call me yesterday?": {"Warum hast du mich gestern nicht angerufen?"},
    "What are you going to do tomorrow?": {"Was wirst du morgen machen?", "Was wirst du morgen tun?"},
    "My sister has two children and a dog.": {"Meine Schwester hat zwei Kinder und einen Hund."},
    "I'm sorry, but I don't have enough money to buy it.": {
        "Es tut mir leid, aber ich habe nicht genug Geld, um es zu kaufen.",
        "Tut mir leid, aber ich habe nicht genug Geld, um es zu kaufen.",
    },
}


@pytest.fixture(scope="module")
def translate():
    return pipeline("translation", model=hf_deqnar.PRETRAINED)


def texts(records: list[dict[str, str]]) -> list[str]:
    return [record["translation_text"] for record in records]


def test_bundled_model_translates_english_to_german(translate):
    for sentence, text in zip(CORRECT, texts(translate(list(CORRECT))), strict=True):
        assert text in CORRECT[sentence]


def test_translation_does_not_depend_on_batch(translate):
    sentences = [*CORRECT, "Hello!", "I can't believe that you have never been to Boston before, Tom."]
    batched = texts(translate(sentences, batch_size=len(sentences)))
    assert batched == texts(translate(sentences, batch_size=1))


def test_command_line_uses_bundled_model_and_prints_drafts():
    command = [sys.executable, "-m", "hf_deqnar.cli.main", "translate", "--watch", *CORRECT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = re.findall(r"^  =>  (.*)\n +converged after \d+ evaluations? of", done.stdout, flags=re.MULTILINE)
    assert len(answers) == len(CORRECT)
    for sentence, text in zip(CORRECT, answers, strict=True):
        assert text in CORRECT[sentence]


# Text that cannot be translated; the quality estimate must say so.
BAD = {
    "empty": "",
    "emoji": "😀🎉",
    "URL": "https://example.org/a?b=c",
    "numbers": "12,345.60",
    "HTML": '<div class="a"><b>Hello</b> world</div>',
    "target language": "Das ist ein schöner Tag heute, nicht wahr?",
    "third language": "¿Dónde está la estación de tren, por favor?",
    "another writing system": "日本語のテキスト",
    "random letters": "asdf qwer zxcv uiop",
    "long repetition": "word " * 2000,
    "long word": "x" * 10_000,
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_has_a_low_quality(translate, kind):
    text = BAD[kind]
    (answer,) = translate(text, return_quality=True, batch_size=8)
    assert answer["quality"] < 0.3
    assert isinstance(answer["translation_text"], str)
    if kind in ("empty", "emoji", "URL", "numbers"):
        assert answer["translation_text"] == text


def test_correct_translations_have_a_high_quality(translate):
    answers = translate(list(CORRECT), return_quality=True)
    assert sum(answer["quality"] > 0.6 for answer in answers) >= len(CORRECT) - 1
    assert all(answer["quality"] > 0.5 for answer in answers)


def test_mixed_languages_are_told_apart_by_sentence(translate):
    text = "Where is the train station? Das ist ein schöner Tag heute."
    (answer,) = translate(text, return_quality=True, return_segments=True)
    english, german = answer["segments"]
    assert english["quality"] > 0.6
    assert german["quality"] < 0.2
    assert german["quality"] < answer["quality"] < english["quality"]


def test_command_line_prints_qualities_and_names_lines_in_another_language(tmp_path):
    lines = [*[*CORRECT][:2], "", "Das ist ein schöner Tag heute, nicht wahr?", "😀"]
    file = tmp_path / "lines.en"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "hf_deqnar.cli.main", "translate", "--input", str(file)]
    done = subprocess.run([*command, "--quality"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert [row[1] in CORRECT[line] for row, line in zip(rows[:2], lines, strict=False)] == [True, True]
    assert [float(row[0]) > 0.5 for row in rows] == [True, True, False, False, False]
    message = f"hf-deqnar translate: {file}, line 4: this does not look like the source language of the model: 'Das ist"
    assert done.stderr.startswith(message)
    assert len(done.stderr.splitlines()) == 1
    done = subprocess.run([*command, "--jsonl"], capture_output=True, text=True, check=False)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [round(one["quality"], 2) for one in records] == [float(row[0]) for row in rows]
    assert ["unfamiliar" in one for one in records] == [False, False, False, True, False]


def test_bundled_model_is_small_and_has_the_code_of_the_package():
    assert sum(file.stat().st_size for file in PRETRAINED.glob("*.safetensors")) <= 20e6
    assert {file.suffix for file in PRETRAINED.iterdir()} == {".json", ".safetensors", ".md", ".py"}
    code = {file.name: file.read_bytes() for file in (PRETRAINED.parent / "models/deqnar").glob("*_deqnar.py")}
    assert code.items() <= {file.name: file.read_bytes() for file in PRETRAINED.glob("*.py")}.items()


def test_folder_loads_without_the_package(tmp_path, translate):
    folder = tmp_path / "copy"
    shutil.copytree(PRETRAINED, folder)  # files in place of links
    script = (
        "import sys\n"
        "sys.modules['hf_deqnar'] = None\n"
        "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "tokens = model.generate(**tokenizer(sys.argv[2], return_tensors='pt'))[0]\n"
        "print(tokenizer.decode(tokens, skip_special_tokens=True))\n"
    )
    sentence = next(iter(CORRECT))
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", script, str(folder), sentence]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == translate(sentence)[0]["translation_text"]


def test_truncated_input_is_short_enough_for_the_model(translate):
    batch = translate.tokenizer("word " * 2000, truncation=True, return_tensors="pt")
    assert batch.input_ids.shape[1] == translate.model.config.max_source_length
    translate.model.generate(**batch, max_nfe=1, num_beams=1)


def test_card_has_data_licence_and_figures():
    card = ModelCard.load(PRETRAINED / "README.md")
    assert card.data.license == "cc-by-2.0"
    for text in ("tatoeba.org", "manythings.org/anki", "CC BY 2.0", "autoregressive teacher", "## Limitations"):
        assert text in card.text
    assert {result.metric_type for result in card.data.eval_results} == {"bleu", "chrf"}
