"""Shared parts of the tests: small real models and ragged batches."""

import pytest
import torch

from hf_deqnar import DeqNarConfig, DeqNarForConditionalGeneration

REFINEMENTS = ("stacked", "implicit", "explicit", "mixed")
PAD, FIRST_WORD, VOCABULARY = 1, 6, 50


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    torch.set_num_threads(1)  # two pytest workers share two cores


def small_config(**overrides) -> DeqNarConfig:
    fields = {"vocab_size": VOCABULARY, "encoder_layers": 2, "decoder_layers": 2, "d_model": 32}
    fields |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 128, "length_offsets": 8}
    return DeqNarConfig.preset("tiny", **{**fields, **overrides})


def small_model(dtype: torch.dtype = torch.float64, seed: int = 0, **overrides) -> DeqNarForConditionalGeneration:
    """A randomly initialised model in evaluation mode."""
    torch.manual_seed(seed)
    return DeqNarForConditionalGeneration(small_config(**overrides)).to(dtype).eval()


def random_sentences(count: int, shortest: int = 1, longest: int = 15, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(FIRST_WORD, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def padded(sentences: list[list[int]], padding: int = PAD, extra: int = 0) -> torch.Tensor:
    """Right-padded rows, with `extra` columns of padding more than needed."""
    longest = max(map(len, sentences)) + extra
    return torch.tensor([sentence + [padding] * (longest - len(sentence)) for sentence in sentences])
