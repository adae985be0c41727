"""The invariants for models whose evaluations are given the predictions of the evaluation before."""

import pytest
import torch

from hf_deqnar import DeqNarForConditionalGeneration
from hf_deqnar.models.deqnar.fixed_point import measure_residual

from ..conftest import padded, random_sentences, real_sentences, self_conditioned_model, small_model

KINDS = [
    {"refinement": refinement, "self_conditioning": kind, "self_conditioning_layers": layers}
    for refinement, kind, layers in (
        ("implicit", "expected", "first"),
        ("implicit", "argmax", "all"),
        ("mixed", "expected", "all"),
    )
]
each_kind = pytest.mark.parametrize("fields", KINDS, ids=lambda fields: "-".join(fields.values()))


@each_kind
def test_translation_does_not_depend_on_the_batch(fields, tokenizer):
    model = self_conditioned_model(
        **fields, length="ctc", transition_layers=2, vocab_size=len(tokenizer), max_position_embeddings=512
    )
    sentences = real_sentences(6)

    def translate(batch: list[str]) -> list[tuple]:
        encoded = tokenizer(batch, return_tensors="pt", padding=True)
        out = model.generate(**encoded, return_dict_in_generate=True)
        return list(zip(tokenizer.batch_decode(out.sequences), out.nfe.tolist(), out.residual.tolist(), strict=True))

    single = [translate([sentence])[0] for sentence in sentences]
    order = [3, 0, 5, 1, 4, 2]
    for place, found in enumerate(translate([sentences[index] for index in order])):
        text, nfe, residual = single[order[place]]
        assert found[0].rstrip("<pad>") == text.rstrip("<pad>")
        assert found[1] == nfe
        assert found[2] == pytest.approx(residual, rel=1e-6)


@each_kind
def test_a_converged_row_has_a_small_residual_when_evaluated_again(fields):
    model = self_conditioned_model(**fields, max_nfe=40, tol=1e-5)
    with torch.no_grad():
        source = model.prepare(padded(random_sentences(5)))
        canvas = model.lay_out(source, lengths=source.lengths)
        found = model.solve(source, canvas)
        by_hand = measure_residual(found.state, found.function(found.state), canvas.mask)
    torch.testing.assert_close(found.residual, by_hand, rtol=1e-3, atol=1e-9)
    assert torch.equal(found.converged, by_hand < 1e-5)
    assert found.converged.any()


def test_the_implicit_gradient_is_that_of_the_iteration_unrolled_to_convergence():
    tokens = padded(random_sentences(3, shortest=4))
    labels = padded(random_sentences(3, shortest=2, longest=3, seed=1), padding=-100)

    def gradients(**options) -> dict[str, torch.Tensor]:
        model = self_conditioned_model(length="ctc", strength=0.03, max_nfe=200, tol=1e-11, **options)
        with torch.enable_grad():
            model(input_ids=tokens, labels=labels).loss.backward()
        return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    exact = gradients(gradient="unrolled", gradient_steps=150)
    implicit = gradients(gradient="ift", gradient_max_nfe=200, gradient_tol=1e-11)
    assert exact["model.transition.self_conditioning.feedback.0.weight"].norm() > 0
    for name, gradient in exact.items():
        torch.testing.assert_close(implicit[name], gradient, rtol=1e-5, atol=1e-8)


@each_kind
def test_a_saved_model_translates_the_same(fields, tmp_path):
    model = self_conditioned_model(**fields, length="ctc")
    model.save_pretrained(tmp_path)
    again = DeqNarForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float64)
    tokens = padded(random_sentences(4))
    assert torch.equal(again.generate(tokens), model.generate(tokens))


def test_it_starts_as_the_model_without_self_conditioning():
    backbone = small_model(refinement="stacked", length="ctc")
    options = {"feedback": "learned", "self_conditioning": "expected", "self_conditioning_layers": "all"}
    model = DeqNarForConditionalGeneration.from_backbone(backbone, **options)
    tokens = padded(random_sentences(4))
    with torch.no_grad():
        out, plain = model(input_ids=tokens), backbone(input_ids=tokens)
    torch.testing.assert_close(out.logits[out.canvas_mask], plain.logits[out.canvas_mask])
    assert (out.nfe == 2).all(), "the second evaluation finds that nothing changes"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"refinement": "stacked"}, "needs refinement='implicit' or 'mixed', but it is 'stacked'"),
        ({"refinement": "explicit"}, "needs refinement='implicit' or 'mixed', but it is 'explicit'"),
        ({"feedback": "sum"}, "needs feedback='learned' and tied embeddings, but feedback='sum'"),
        ({"self_conditioning": "some"}, "self_conditioning='some' is unknown"),
        (
            {"self_conditioning": "none", "self_conditioning_layers": "all"},
            "self_conditioning_layers='all' has no effect",
        ),
    ],
)
def test_combinations_that_have_no_meaning_are_refused(fields, message):
    options = {"self_conditioning": "expected", "feedback": "learned", **fields}
    if options["refinement" if "refinement" in fields else "feedback"] == "stacked":
        options.pop("feedback")
    with pytest.raises(ValueError, match=message):
        small_model(**options)
