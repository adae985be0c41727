import json
import math
import os
import subprocess
import sys

import pytest

from hf_deqnar import METRICS
from hf_deqnar.data.parallel_text import Pair
from hf_deqnar.evaluation.metrics import corpus_scores, score
from hf_deqnar.evaluation.translation import Translations

from ..conftest import SENTENCES

sacrebleu = pytest.importorskip("sacrebleu", reason="sacrebleu is part of the train extra")
GERMAN = [german for _, german in SENTENCES]
SHORT = [" ".join(german.split()[:-1]) for german in GERMAN]


def test_short_translations_have_a_brevity_penalty_below_one():
    figures = corpus_scores(SHORT, [[german] for german in GERMAN])
    expected = sacrebleu.corpus_bleu(SHORT, [GERMAN])
    assert figures["bleu"] == pytest.approx(expected.score)
    assert figures["length_ratio"] == pytest.approx(expected.sys_len / expected.ref_len)
    assert figures["length_ratio"] < 0.9
    assert figures["brevity_penalty"] == pytest.approx(math.exp(1 - expected.ref_len / expected.sys_len))


def test_numbers_of_translations_and_references_must_agree():
    with pytest.raises(ValueError, match="There are 1 translations but references of 2 sentences."):
        corpus_scores(["a"], [["a"], ["b"]])
    with pytest.raises(ValueError, match="There are no translations to score."):
        corpus_scores([], [])
    with pytest.raises(ValueError, match="Sentence 2 has no reference."):
        corpus_scores(["a", "b"], [["a"], []])


def test_the_evaluate_library_computes_the_same_figures_offline(tmp_path):
    pytest.importorskip("evaluate", reason="evaluate is an extra")
    code = f"""
import evaluate, hf_deqnar, json
metric = evaluate.load(str(hf_deqnar.METRICS))
several = [[german, german.lower()] if number % 2 else [german] for number, german in enumerate({GERMAN})]
print(json.dumps([metric.compute(predictions={SHORT}, references=refs) for refs in (several, {GERMAN})]))
"""
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    several = [[german, german.lower()] if number % 2 else [german] for number, german in enumerate(GERMAN)]
    for found, references in zip(
        json.loads(done.stdout.splitlines()[-1]), (several, [[one] for one in GERMAN]), strict=True
    ):
        pairs = [Pair("", one) for one in references]
        expected = score(Translations(SHORT, 1.0), pairs)
        assert found == {name: expected[name] for name in found}
        assert {"bleu_signature", "chrf_signature", "length_ratio", "brevity_penalty"} <= set(found)


def test_the_metric_is_a_folder_with_a_script_of_its_name():
    assert os.path.isfile(os.path.join(METRICS, f"{os.path.basename(METRICS)}.py"))
