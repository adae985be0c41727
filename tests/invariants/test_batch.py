"""Output, evaluations and residual of a sentence do not depend on its batch or padding."""

import pytest
import torch
from transformers import pipeline

from hf_deqnar import solve
from hf_deqnar.models.deqnar.solvers import SOLVERS

from ..conftest import REFINEMENTS, padded, random_sentences, real_sentences, small_model, with_input_predictor
from .functions import Contraction


@pytest.mark.parametrize("solver", SOLVERS)
def test_solution_does_not_depend_on_batch(solver):
    function = Contraction.random(rows=7, positions=4, features=6, strength=0.95)
    options = {"solver": solver, "tol": 1e-8, "max_nfe": 60}
    single = [solve(function.select(torch.tensor([row])), function.zeros[:1], **options) for row in range(7)]
    assert len({int(found.nfe) for found in single}) > 1  # rows converge at different times
    for _ in range(4):
        order = torch.randperm(7)
        batched = solve(function.select(order), function.zeros, **options)
        for place, row in enumerate(order):
            assert batched.nfe[place] == single[row].nfe
            torch.testing.assert_close(batched.residual[place], single[row].residual[0], rtol=1e-6, atol=1e-14)
            torch.testing.assert_close(batched.value[place], single[row].value[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("solver", SOLVERS)
def test_padding_has_no_effect(solver):
    short = Contraction.random(rows=3, positions=4, features=6, strength=0.9)
    junk = torch.randn(3, 5, 6, dtype=torch.float64) * 100
    longer = Contraction(short.weight, torch.cat([short.context, junk], dim=1))
    mask = torch.arange(9).expand(3, 9) < 4
    tight = solve(short, short.zeros, solver=solver, tol=1e-8, max_nfe=60)
    loose = solve(longer, longer.zeros, solver=solver, mask=mask, tol=1e-8, max_nfe=60)
    assert torch.equal(tight.nfe, loose.nfe)
    torch.testing.assert_close(tight.residual, loose.residual, rtol=1e-6, atol=1e-14)
    torch.testing.assert_close(tight.value, loose.value[:, :4], rtol=1e-10, atol=1e-12)
    assert (loose.state[:, 4:] == 0).all()


@pytest.mark.parametrize("length", ["predict", "ctc"])
@pytest.mark.parametrize("refinement", REFINEMENTS)
def test_logits_do_not_depend_on_batch(refinement, length):
    model = small_model(refinement=refinement, length=length, tol=1e-6, max_nfe=40)
    sentences = random_sentences(6)

    def read(batch: list[list[int]], extra: int = 0) -> list[tuple]:
        with torch.no_grad():
            out = model(input_ids=padded(batch, extra=extra))
        residual = torch.zeros(len(batch)) if out.residual is None else out.residual
        lengths = out.canvas_mask.sum(dim=1)
        return [(out.logits[row, : lengths[row]], out.nfe[row], residual[row]) for row in range(len(batch))]

    single = [read([sentence])[0] for sentence in sentences]
    for extra in (0, 1, 7):
        order = torch.randperm(6).tolist()
        batched = read([sentences[index] for index in order], extra)
        for place, index in enumerate(order):
            for actual, expected in zip(batched[place], single[index], strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)
            assert batched[place][1] == single[index][1]


OPTIONS = [{}, {"refinement_passes": 3}, {"stop_on_stable_tokens": 2}, {"beams": 3}, {"input_sampling": True}]
CASES = [  # a stacked model evaluates once, so there is no iteration to stop
    (refinement, options)
    for refinement in REFINEMENTS
    for options in OPTIONS
    if refinement != "stacked" or "stop_on_stable_tokens" not in options
]


@pytest.mark.parametrize("length", ["predict", "ctc"])
@pytest.mark.parametrize(("refinement", "options"), CASES)
def test_translation_of_real_sentences_does_not_depend_on_batch(refinement, length, options, tokenizer):
    sentences = real_sentences(6)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 512}
    fields = {"refinement": refinement, "length": length, **sizes}
    if "input_sampling" in options:
        model = with_input_predictor(tokenizer(sentences, return_tensors="pt", padding=True)["input_ids"], **fields)
    else:
        model = small_model(**fields)
    options = {"ctc_beam_size" if length == "ctc" else "length_beams": 3} if "beams" in options else options

    def translate(batch: list[str]) -> list[tuple]:
        encoded = tokenizer(batch, return_tensors="pt", padding=True)
        out = model.generate(**encoded, **options, return_dict_in_generate=True)
        residual = [0.0] * len(batch) if out.residual is None else out.residual.tolist()
        texts = tokenizer.batch_decode(out.sequences, skip_special_tokens=True)
        return list(zip(texts, out.nfe.tolist(), residual, strict=True))

    single = [translate([sentence])[0] for sentence in sentences]
    order = torch.randperm(6).tolist()
    batched = translate([sentences[index] for index in order])
    for place, index in enumerate(order):
        assert batched[place][:2] == single[index][:2]
        assert batched[place][2] == pytest.approx(single[index][2], rel=1e-6)


def test_pipeline_translation_does_not_depend_on_batch(tokenizer):
    model = small_model(length="ctc", vocab_size=len(tokenizer), max_position_embeddings=512)
    translate = pipeline("translation", model=model, tokenizer=tokenizer)
    sentences = real_sentences(9)
    single = [translate(sentence, return_figures=True)[0] for sentence in sentences]
    for size in (2, 4, 9):
        for actual, expected in zip(translate(sentences, batch_size=size, return_figures=True), single, strict=True):
            assert actual["translation_text"] == expected["translation_text"]
            assert actual["nfe"] == expected["nfe"]
            assert actual["residual"] == pytest.approx(expected["residual"], rel=1e-6)
