"""A tiny teacher, and a corpus that includes empty, long and repeated sentences."""

import pytest

from hf_deqnar.data.parallel_text import Pair
from hf_deqnar.distillation.teachers import Teacher, TeacherOptions

from ..conftest import SENTENCES
from ..models.deqnar.test_generation_deqnar import reranker

OPTIONS = TeacherOptions(num_beams=2, max_length=12, batch_tokens=60, shard_sentences=7)
COLUMNS = {"source": "en", "target": "de"}


def corpus(count: int = 40) -> list[Pair]:
    sources = [" ".join(SENTENCES[number % 6][0].split()[: 1 + number % 7]) + f" {number}" for number in range(count)]
    pairs = [Pair(source, [f"Satz {number}"]) for number, source in enumerate(sources)]
    return [*pairs, Pair(" ", ["leer"]), Pair("horse \u2028 " * 60, ["lang"])]


def make_teacher(tokenizer, name: str = "runs/teacher", init_std: float = 0.6) -> Teacher:
    """With weights that are large enough that different sentences have different translations."""
    return Teacher(name, reranker(len(tokenizer), init_std=init_std), tokenizer)


@pytest.fixture
def teacher(tokenizer):
    return make_teacher(tokenizer)
