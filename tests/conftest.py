"""Fixtures and helpers: small models and batches of different lengths."""

import os
from pathlib import Path

os.environ.setdefault(
    "HF_HUB_OFFLINE", "1"
)  # set before transformers is imported, so that unknown names fail immediately

import pytest
import torch
from transformers.utils import logging

from hf_deqnar import DeqNarConfig, DeqNarForConditionalGeneration
from hf_deqnar.data.parallel_text import read_parallel
from hf_deqnar.data.tokenizer import train_tokenizer
from hf_deqnar.models.deqnar.layers_deqnar import BranchEnd

# Untrained layers are nearly the identity, for which the invariants hold trivially; here branches have full scale.
BranchEnd.initial_gain = 1.0

REFINEMENTS = ("stacked", "implicit", "explicit", "mixed")
PAD, FIRST_WORD, VOCABULARY = 1, 6, 50


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    torch.set_num_threads(1)  # two pytest workers share two cores


@pytest.fixture(autouse=True)
def _default_logging():
    """The command line silences transformers for its process, which here is that of other tests too."""
    logging.set_verbosity_warning()
    logging.enable_progress_bar()


def small_config(**overrides) -> DeqNarConfig:
    fields = {"vocab_size": VOCABULARY, "encoder_layers": 2, "decoder_layers": 2, "d_model": 32}
    fields["feedback"] = "sum"  # learned feedback starts at zero, where an equilibrium is reached at once
    fields |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 128, "length_offsets": 8}
    return DeqNarConfig.preset("tiny", **{**fields, **overrides})


def small_model(dtype: torch.dtype = torch.float64, seed: int = 0, **overrides) -> DeqNarForConditionalGeneration:
    """A randomly initialised model in evaluation mode."""
    torch.manual_seed(seed)
    return DeqNarForConditionalGeneration(small_config(**overrides)).to(dtype).eval()


def self_conditioned_model(strength: float = 0.1, **overrides) -> DeqNarForConditionalGeneration:
    """A model whose evaluations are given the predictions of the one before, with feedback as if it were trained."""
    options = {"refinement": "implicit", "feedback": "learned", "self_conditioning": "expected", **overrides}
    model = small_model(**options)
    generator = torch.Generator().manual_seed(3)
    transition = model.model.transition
    for layer in (transition.feedback, *transition.self_conditioning.feedback):
        layer.weight.data.normal_(std=strength, generator=generator)
    return model


def random_sentences(count: int, shortest: int = 1, longest: int = 15, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(FIRST_WORD, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def padded(sentences: list[list[int]], padding: int = PAD, extra: int = 0) -> torch.Tensor:
    """Right-padded rows, with `extra` columns of padding more than needed."""
    longest = max(map(len, sentences)) + extra
    return torch.tensor([sentence + [padding] * (longest - len(sentence)) for sentence in sentences])


def with_input_predictor(tokens: torch.Tensor, **fields) -> DeqNarForConditionalGeneration:
    """A model whose input predictor reveals about half of the positions, with different probabilities."""
    model = small_model(input_predictor=True, **fields)
    head = model.model.input_head
    head.weight.data.normal_(generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        out = model(input_ids=tokens)
        odds = head(out.last_hidden_state)[out.canvas_mask]
    head.weight.data.mul_(1.5 / odds.std())
    head.bias.data.fill_(-1.5 * odds.mean() / odds.std())
    return model


PAIRS_FILE = Path(__file__).parent / "data" / "pairs.jsonl"  # of Tatoeba; see the README beside it
SENTENCES = [
    ("A man is riding a horse.", "Ein Mann reitet auf einem Pferd."),
    ("Two dogs are playing in the snow.", "Zwei Hunde spielen im Schnee."),
    ("Where is the train station?", "Wo ist der Bahnhof?"),
    ("I would like a cup of coffee.", "Ich hätte gern eine Tasse Kaffee."),
    ("My brother has lived in Berlin for three years.", "Mein Bruder wohnt seit drei Jahren in Berlin."),
    ("She is reading.", "Sie liest."),
]


def real_sentences(count: int) -> list[str]:
    """English sentences of `PAIRS_FILE`, alternately short and long."""
    return [pair.source for pair in read_parallel(PAIRS_FILE, "en", "de")[:count]]


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer([text for pair in SENTENCES for text in pair] * 5, vocab_size=400)


@pytest.fixture(scope="session")
def saved(tokenizer, tmp_path_factory):
    """Directories of small models with their tokenizer: one that predicts lengths, one for CTC."""
    folders = {}
    for length in ("predict", "ctc"):
        folders[length] = tmp_path_factory.mktemp(length)
        small_model(torch.float32, length=length, vocab_size=len(tokenizer)).save_pretrained(folders[length])
        tokenizer.save_pretrained(folders[length])
    return folders
