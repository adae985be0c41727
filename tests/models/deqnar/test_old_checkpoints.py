"""Checkpoints that version 0.1.0 saved load without a warning and translate as they did (tests/data/README.md)."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

import hf_deqnar  # noqa: F401  (registers the model)

from ...conftest import PAD

FOLDERS = sorted(folder for folder in (Path(__file__).parents[2] / "data" / "version-0.1").iterdir() if folder.is_dir())
TOKENS = torch.tensor([[7, 9, 11, 8, 2], [10, 13, 2, PAD, PAD]])


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_checkpoint_of_version_0_1_translates_as_it_did(folder):
    model, loading = AutoModelForSeq2SeqLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    batch = {"input_ids": TOKENS, "attention_mask": (TOKENS != PAD).long()}
    with torch.no_grad():
        out = model.eval()(**batch)
    logits = out.logits.masked_fill(~out.canvas_mask[..., None], 0).double()
    assert logits.abs().sum((1, 2)).tolist() == pytest.approx(expected["logits_sum"], rel=1e-4)
    generated = model.generate(**batch, return_dict_in_generate=True)
    assert generated.sequences.tolist() == expected["sequences"]
    assert generated.nfe.tolist() == expected["nfe"]
