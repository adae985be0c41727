"""The model in the box: it is there, small, says whose sentences it learned from, and translates everyday English."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from transformers import pipeline

import hf_deqnar

BOX = Path(hf_deqnar.BOX)

# What a German would accept; the model must say one of them.
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
    return pipeline("translation", model=hf_deqnar.BOX)


def texts(records: list[dict[str, str]]) -> list[str]:
    return [record["translation_text"] for record in records]


def test_it_says_in_german_what_was_said_in_english(translate):
    for sentence, text in zip(CORRECT, texts(translate(list(CORRECT))), strict=True):
        assert text in CORRECT[sentence]


def test_a_sentence_is_translated_the_same_in_any_company(translate):
    sentences = [*CORRECT, "Hello!", "I can't believe that you have never been to Boston before, Tom."]
    together = texts(translate(sentences, batch_size=len(sentences)))
    assert together == texts(translate(sentences, batch_size=1))


def test_the_command_line_uses_it_and_shows_it_settle():
    command = [sys.executable, "-m", "hf_deqnar.cli.main", "translate", "--watch", *CORRECT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = re.findall(r"^  =>  (.*)\n +settled after \d+ evaluations? of", done.stdout, flags=re.MULTILINE)
    assert len(answers) == len(CORRECT)
    for sentence, text in zip(CORRECT, answers, strict=True):
        assert text in CORRECT[sentence]


def test_it_is_small_and_carries_nothing_but_itself():
    assert sum(file.stat().st_size for file in BOX.glob("*.safetensors")) <= 20e6
    assert {file.suffix for file in BOX.iterdir()} == {".json", ".safetensors", ".md"}


def test_its_card_names_the_data_its_licence_and_its_figures():
    card = ModelCard.load(BOX / "README.md")
    assert card.data.license == "cc-by-2.0"
    for text in ("tatoeba.org", "manythings.org/anki", "CC BY 2.0", "autoregressive teacher", "## Limits"):
        assert text in card.text
    assert {result.metric_type for result in card.data.eval_results} == {"bleu", "chrf"}
