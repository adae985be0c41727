"""Small models, exported once for all tests: an export takes seconds for any size."""

import os
from pathlib import Path

import pytest

pytest.importorskip("onnxscript", reason="onnxscript is part of the onnx extra")
pytest.importorskip("onnxruntime", reason="onnxruntime is part of the onnx extra")

import torch
from filelock import FileLock

from hf_deqnar import DeqNarOnnxModel
from hf_deqnar.data.ngram_counts import add_ngrams
from hf_deqnar.data.shortlist_counts import add_shortlist
from hf_deqnar.export.graphs import export_model
from hf_deqnar.export.manifest import PRECISIONS

from ..conftest import SENTENCES, small_model, with_input_predictor

# Every refinement, all length models, latent variables, and other options that change a graph.
KINDS = {
    "implicit": {"refinement": "implicit", "length": "ctc", "weight_norm": "weight", "layer_norm": "pre"},
    "mixed": {"refinement": "mixed", "length": "predict", "latent": "vae"},
    "stacked": {"refinement": "stacked", "length": "ctc", "positions": "learned", "layernorm_embedding": True},
    "mixed with a shortlist": {"refinement": "mixed", "length": "ctc", "shortlist": True, "feedback": "learned"},
    "self-conditioned": {"length": "ctc", "shortlist": True, "feedback": "learned", "self_conditioning": "expected"},
    "graph": {"length": "dag", "dag_upsampling": 3, "feedback": "learned", "self_conditioning": "expected"},
    "explicit": {"refinement": "explicit", "length": "ctc", "input_predictor": True, "shortlist": True},
}


def pytest_collection_modifyitems(items):
    """Exporting takes seconds, so the fast tests export one kind of model only."""
    for item in items:
        kind = getattr(item, "callspec", None) and item.callspec.params.get("kind")
        if item.path.parent == Path(__file__).parent and kind in KINDS and kind != "implicit":
            item.add_marker(pytest.mark.slow)


def export_once(model, tokenizer, folder: Path) -> dict[str, Path]:
    """Folders by precision; the workers of pytest-xdist make the same models and share their exports."""
    folder.parent.mkdir(exist_ok=True)
    complete = folder.with_suffix(".complete")
    with FileLock(folder.with_suffix(".lock")):
        if not complete.exists():
            export_model(model, tokenizer, folder)
            complete.touch()
    return {precision: folder / precision for precision in PRECISIONS}


@pytest.fixture(scope="session")
def batch(tokenizer):
    return dict(tokenizer([english for english, _ in SENTENCES], return_tensors="pt", padding=True))


@pytest.fixture(scope="session")
def exported(tokenizer, batch, tmp_path_factory):
    """A function: kind → (the model in torch, folders by precision)."""
    made = {}
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "exports"

    def make(kind: str) -> tuple:
        if kind not in made:
            fields = {**KINDS[kind], "vocab_size": len(tokenizer), "encoder_layers": 1, "decoder_layers": 1}
            shortlist = fields.pop("shortlist", False)
            if fields.pop("input_predictor", False):
                model = with_input_predictor(batch["input_ids"], **fields).float()
            else:
                model = small_model(torch.float32, **fields)
            if model.model.latent_head is not None:
                torch.nn.init.normal_(model.model.latent_head.prior.weight, std=0.3)
            if model.config.feedback == "learned":
                torch.nn.init.normal_(model.model.transition.feedback.weight, std=0.1)
            if model.config.is_self_conditioned:
                torch.nn.init.normal_(model.model.transition.self_conditioning.feedback[0].weight, std=0.1)
            if shortlist:
                texts = [tokenizer(list(side))["input_ids"] for side in zip(*SENTENCES, strict=True)]
                add_shortlist(model, *texts, size=8, common=60)
            if model.config.length == "ctc":
                add_ngrams(model, batch["input_ids"].tolist() * 2, order=3, least=1, weight=0.5, bonus=0.5)
                model.generation_config.update(ctc_beam_size=1, ngram_weight=0.0, token_bonus=0.0)
            made[kind] = (model, export_once(model, tokenizer, shared / kind))
        return made[kind]

    return make


@pytest.fixture(scope="session")
def loaded(exported):
    """A function: kind, precision → the model in torch, the exported one."""
    made = {}

    def load(kind: str, precision: str) -> tuple:
        model, folders = exported(kind)
        if (kind, precision) not in made:
            made[kind, precision] = DeqNarOnnxModel.from_pretrained(folders[precision], threads=1)
        return model, made[kind, precision]

    return load
