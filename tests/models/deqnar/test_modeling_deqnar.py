import json
import math
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel
from transformers.utils import hub

from hf_deqnar import PRETRAINED, DeqNarForConditionalGeneration, DeqNarModel
from hf_deqnar.models.deqnar.layers_deqnar import BranchEnd, _position_table, position_table, sinusoidal_positions
from hf_deqnar.models.deqnar.refinement_deqnar import Source
from hf_deqnar.models.deqnar.stability import jacobian_penalty
from hf_deqnar.models.deqnar.transition_deqnar import draw_dropout_mask

from ...conftest import FIRST_WORD, PAD, REFINEMENTS, VOCABULARY, padded, random_sentences, small_model

MASK = 4


def labelled(count: int = 4) -> dict[str, torch.Tensor]:
    tokens = padded(random_sentences(count, shortest=3))
    return {"input_ids": tokens, "labels": tokens.masked_fill(tokens == PAD, -100)}


@pytest.mark.parametrize("weight_norm", ["none", "weight", "spectral"])
def test_residual_branches_start_with_a_tenth_of_xavier_weights(monkeypatch, weight_norm):
    plain = small_model(weight_norm=weight_norm)
    monkeypatch.setattr(BranchEnd, "initial_gain", 0.1)
    small = small_model(weight_norm=weight_norm)
    ends = 0
    for (name, module), other in zip(small.named_modules(), plain.modules(), strict=True):
        if isinstance(module, torch.nn.Linear):
            share = 0.1 if isinstance(module, BranchEnd) else 1.0
            torch.testing.assert_close(module.weight, share * other.weight, msg=name)
            ends += share < 1
    assert ends == 2 * 2 + 3  # two encoder layers, one decoder layer


@pytest.mark.parametrize("latent", ["none", "vae"])
@pytest.mark.parametrize("length", ["predict", "ctc"])
@pytest.mark.parametrize("refinement", REFINEMENTS)
@pytest.mark.parametrize("layer_norm", ["post", "pre"])
def test_training_updates_every_parameter(refinement, length, latent, layer_norm):
    model = small_model(refinement=refinement, length=length, latent=latent, layer_norm=layer_norm).train()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(**labelled()).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    still = [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]
    assert still == []


@pytest.mark.parametrize("refinement", REFINEMENTS)
def test_output_is_deterministic(refinement):
    model, tokens = small_model(refinement=refinement), padded(random_sentences(4))
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, model(input_ids=tokens).logits)


def test_embeddings_are_tied_also_after_resizing():
    model = small_model()
    assert model.lm_head.weight is model.model.shared.weight
    model.resize_token_embeddings(VOCABULARY + 7)
    assert model.lm_head.weight is model.model.shared.weight
    assert model.config.vocab_size == VOCABULARY + 7
    with torch.no_grad():
        assert model(input_ids=padded(random_sentences(2))).logits.shape[-1] == VOCABULARY + 7


def test_untied_embeddings_are_two_matrices(tmp_path):
    model = small_model(tie_word_embeddings=False)
    assert model.lm_head.weight is not model.model.shared.weight
    model.save_pretrained(tmp_path)
    loaded = DeqNarForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert not torch.equal(loaded.lm_head.weight, loaded.model.shared.weight)


@pytest.mark.parametrize("refinement", REFINEMENTS)
def test_tuple_outputs_equal_named_outputs(refinement):
    model, batch = small_model(refinement=refinement), labelled()
    with torch.no_grad():
        named, plain = model(**batch), model(**batch, return_dict=False)
    assert isinstance(plain, tuple)
    for actual, expected in zip(plain, named.to_tuple(), strict=True):
        assert torch.equal(actual, expected)
    assert plain[0] == named.loss


def test_hidden_states_and_attentions_have_all_layers():
    model = small_model(transition_layers=2)
    tokens = padded([[7, 8, 9], [10, 11]])
    canvas = padded([[MASK] * 5, [MASK] * 4])
    with torch.no_grad():
        out = model(input_ids=tokens, decoder_input_ids=canvas, output_attentions=True, output_hidden_states=True)
        plain = model(input_ids=tokens, decoder_input_ids=canvas)
    torch.testing.assert_close(out.logits, plain.logits)
    assert [tuple(hidden.shape) for hidden in out.encoder_hidden_states] == [(2, 3, 32)] * 3
    assert [tuple(hidden.shape) for hidden in out.decoder_hidden_states] == [(2, 5, 32)] * 3
    assert [tuple(weights.shape) for weights in out.encoder_attentions] == [(2, 4, 3, 3)] * 2
    assert [tuple(weights.shape) for weights in out.decoder_attentions] == [(2, 4, 5, 5)] * 2
    assert [tuple(weights.shape) for weights in out.cross_attentions] == [(2, 4, 5, 3)] * 2
    for weights in (*out.encoder_attentions, *out.decoder_attentions, *out.cross_attentions):
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(weights.shape[:-1], dtype=torch.float64))
    assert (out.cross_attentions[0][1, :, :, 2] == 0).all()  # padding is not attended to
    real = out.canvas_mask
    torch.testing.assert_close(out.decoder_hidden_states[-1][real], out.last_hidden_state[real])


@pytest.mark.parametrize("refinement", REFINEMENTS)
def test_eager_and_fused_attention_agree(refinement):
    model, tokens = small_model(refinement=refinement, length="ctc"), padded(random_sentences(5))
    with torch.no_grad():
        fused = model(input_ids=tokens).logits
        model.set_attn_implementation("eager")
        torch.testing.assert_close(model(input_ids=tokens).logits, fused)


def test_padding_does_not_change_encoder_states_in_bfloat16():
    sentences = random_sentences(12)
    model, tokens = small_model(torch.bfloat16), padded(sentences, extra=3)
    with torch.no_grad():
        batched = model.get_encoder()(tokens, tokens != PAD).last_hidden_state
        for row, sentence in enumerate(sentences):
            single = model.get_encoder()(torch.tensor([sentence])).last_hidden_state[0]
            assert torch.equal(batched[row, : len(sentence)], single)


@pytest.mark.parametrize("weight_norm", ["none", "weight", "spectral"])
@pytest.mark.parametrize("kind", ["one_step", "phantom", "ift", "unrolled"])
def test_gradient_checkpointing_does_not_change_gradients(kind, weight_norm):
    def gradients(checkpointing: bool) -> dict[str, torch.Tensor]:
        model = small_model(gradient=kind, weight_norm=weight_norm).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(5)
        model(**labelled()).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    stored, recomputed = gradients(False), gradients(True)
    for name, gradient in stored.items():
        torch.testing.assert_close(recomputed[name], gradient, msg=name)


@pytest.mark.parametrize("refinement", ["implicit", "mixed"])
def test_dropout_masks_are_constant_during_a_solve(refinement):
    """In training f has a fixed point only if it is the same function in every evaluation."""
    model = small_model(refinement=refinement, dropout=0.3, max_nfe=200, tol=1e-8).train()
    if refinement == "mixed":
        model.model.transition.fusion[2].weight.data *= 0.02  # a random fusion cycles between tokens
    out = model(**labelled())
    assert out.converged.all()
    assert not torch.equal(out.logits, model(**labelled()).logits)  # new masks for the next solve


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("refinement", REFINEMENTS)
def test_half_precision_weights_are_solved_in_fp32(refinement, dtype):
    model, tokens = small_model(torch.float32, refinement=refinement), padded(random_sentences(4))
    canvas = torch.where(tokens != PAD, model.config.mask_token_id, PAD)
    with torch.no_grad():
        exact = model(input_ids=tokens, decoder_input_ids=canvas)
        half = model.to(dtype)(input_ids=tokens, decoder_input_ids=canvas)
    assert half.logits.dtype == dtype
    if refinement != "stacked":
        assert half.residual.dtype == torch.float32
    if refinement != "mixed":  # a different arg-max leads to another equilibrium
        real = canvas != PAD
        assert (half.logits.float() - exact.logits)[real].abs().mean() < 0.05 * exact.logits[real].abs().mean()


def test_revealed_tokens_and_positions_reach_the_equilibrium():
    """An equilibrium does not depend on the initial state, only on the injection."""
    model, tokens = small_model(tol=1e-9, max_nfe=60), padded(random_sentences(2, shortest=6, longest=6))
    hidden = torch.full((2, 6), MASK)
    revealed = hidden.clone()
    revealed[:, 2] = FIRST_WORD + 1
    with torch.no_grad():
        masked = model(input_ids=tokens, decoder_input_ids=hidden)
        glanced = model(input_ids=tokens, decoder_input_ids=revealed)
        elsewhere = model(input_ids=tokens, decoder_input_ids=hidden, initial_state=torch.randn_like(masked.state))
    assert (masked.logits - glanced.logits).abs().max() > 1e-2
    assert (masked.logits[:, 0] - masked.logits[:, 1]).abs().max() > 1e-2
    torch.testing.assert_close(masked.logits, elsewhere.logits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layer_norm", ["post", "pre"])
def test_one_evaluation_of_a_deep_transition_is_the_stacked_backbone(layer_norm):
    stacked = small_model(refinement="stacked", layer_norm=layer_norm)
    tokens = padded(random_sentences(4))
    with torch.no_grad():
        expected = stacked(input_ids=tokens)
        for fields in ({"refinement": "implicit", "transition_layers": 2}, {"refinement": "explicit"}):
            model = small_model(layer_norm=layer_norm, **fields)
            model.load_state_dict(stacked.state_dict())
            out = model(input_ids=tokens, max_nfe=1)
            assert torch.equal(out.logits[out.canvas_mask], expected.logits[out.canvas_mask])


def test_encoder_outputs_can_be_reused():
    model, tokens = small_model(), padded(random_sentences(3))
    with torch.no_grad():
        first = model(input_ids=tokens)
        again = model(encoder_outputs=(first.encoder_last_hidden_state,), attention_mask=tokens != PAD)
    assert torch.equal(first.logits, again.logits)


def test_budget_tolerance_and_solver_can_be_set_for_one_call():
    model, tokens = small_model(), padded(random_sentences(3))
    with torch.no_grad():
        assert model(input_ids=tokens, max_nfe=2).nfe.tolist() == [2, 2, 2]
        tight = model(input_ids=tokens, tol=1e-6, max_nfe=50, solver="broyden")
    assert (tight.residual < 1e-6).all()
    assert model.config.tol == 1e-3


def test_ctc_canvases_are_twice_the_source():
    model = small_model(length="ctc")
    with torch.no_grad():
        out = model(input_ids=padded([[7, 8, 9], [10]]))
    assert out.canvas_mask.sum(dim=1).tolist() == [6, 2]


def test_length_head_is_trained_on_and_predicts_offsets():
    core = small_model().model
    source, target = torch.tensor([5, 6, 100]), torch.tensor([7, 3, 1])
    mask = torch.arange(100)[None] < source[:, None]
    logits = torch.full((3, 16), -20.0)
    logits[0, 8 + 2] = logits[1, 8 - 3] = logits[2, 0] = 20.0  # the last offset is out of range and clamped
    assert core.length_head.loss(logits, source, target) < 1e-6
    assert core.length_model.likeliest_lengths(Source(mask, None, [], logits), 1)[:, 0].tolist() == [7, 3, 92]
    assert core.length_model.likeliest_lengths(Source(mask[:, :1], None, [], logits), 3).min() == 1


def test_latent_divergence_is_the_kl_of_two_gaussians():
    model = small_model(latent="vae", length="ctc")
    head = model.model.latent_head
    for linear in (head.prior, head.posterior):
        linear.weight.data.normal_(std=0.2)
    memory, target = torch.randn(2, 4, 32, dtype=torch.float64), torch.randn(2, 3, 32, dtype=torch.float64)
    mask, target_mask = torch.tensor([[True] * 4, [True, True, False, False]]), torch.ones(2, 3, dtype=torch.bool)
    _, divergence = head(memory, mask, target, target_mask)

    key, value = head.posterior_layer.cross_attention.project(target)
    minus = torch.finfo(torch.float64).min
    additive = torch.zeros(2, 1, 1, 4, dtype=torch.float64).masked_fill(~mask[:, None, None], minus)
    hidden = head.posterior_layer(memory, key, value, additive, None, None, None, None)
    q_mean, q_log = head.posterior(hidden)
    p_mean, p_log = head.prior(memory)
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(normal(q_mean, q_log.exp()), normal(p_mean, p_log.exp()))
    torch.testing.assert_close(divergence, (expected.sum(dim=-1) * mask).sum(dim=1))


def test_free_bits_are_a_lower_bound_of_the_divergence():
    with torch.no_grad():
        out = small_model(latent="vae", length="ctc", latent_free_bits=0.5)(**labelled(2))
    lengths = (labelled(2)["input_ids"] != PAD).sum(dim=1)
    torch.testing.assert_close(out.latent_kl, 0.5 * lengths.double())


def test_prior_mean_is_used_without_target():
    model = small_model(latent="vae", length="ctc")
    model.model.latent_head.prior.weight.data.normal_(std=0.2)
    with torch.no_grad():
        tokens = padded(random_sentences(2))
        with_latent = model(input_ids=tokens)
        model.model.latent_head.lift.weight.data.zero_()
        without = model(input_ids=tokens)
    assert with_latent.latent_kl is None
    assert not torch.allclose(with_latent.logits, without.logits)


def test_invalid_batch_is_refused_with_a_clear_error():
    model = small_model()
    good = torch.tensor([[7, 8, 9]])
    for inputs, message in [
        ({"input_ids": torch.zeros(0, 4, dtype=torch.long)}, r"source is empty: its shape is \(0, 4\)"),
        ({"input_ids": torch.zeros(2, 0, dtype=torch.long)}, r"source is empty"),
        ({"input_ids": torch.tensor([7, 8])}, r"source must be rows × length, but its shape is \(2,\)"),
        ({"input_ids": torch.tensor([[7, 8], [PAD, PAD]])}, r"Row\(s\) \[1\] of the source are all padding"),
        ({"input_ids": torch.tensor([[7, 8], [PAD, 8]])}, "padded on the left.*padding_side"),
        ({"input_ids": torch.full((1, 129), 7)}, "source is 129 positions long, but max_position_embeddings is 128"),
        ({"input_ids": good, "decoder_input_ids": torch.zeros(1, 0, dtype=torch.long)}, "canvas is empty"),
        ({"input_ids": good, "decoder_input_ids": torch.tensor([[PAD]])}, r"Row\(s\) \[0\] of the canvas"),
        ({"input_ids": good, "decoder_input_ids": torch.full((1, 200), MASK)}, "canvas is 200 positions long"),
        ({"input_ids": good, "labels": torch.tensor([[-100, -100]])}, r"Row\(s\) \[0\] of the labels are all padding"),
        ({"input_ids": good, "labels": torch.tensor([[-100, 7]])}, "labels is padded on the left"),
        ({"input_ids": good, "labels": torch.tensor([[7, -100, 7]])}, "labels have padding between tokens"),
        (
            {"input_ids": good, "attention_mask": torch.tensor([[1, 0, 1]])},
            r"Row\(s\) \[0\] of the source have padding between tokens",
        ),
        ({"input_ids": good, "attention_mask": torch.ones(1, 2)}, r"source is \(1, 3\) but its mask is \(1, 2\)"),
        (
            {"input_ids": good, "labels": torch.tensor([[7, 8]]), "decoder_input_ids": torch.tensor([[MASK] * 3])},
            r"canvas is \(1, 3\) but the labels are \(1, 2\)",
        ),
        ({}, "Give input_ids"),
        ({"input_ids": good, "solver": "newton"}, "Unknown solver 'newton'"),
        ({"input_ids": good, "max_nfe": 0}, "max_nfe must be at least 1"),
        ({"input_ids": good, "tol": 0.0}, "tol must be above 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            model(**inputs)


def test_ctc_source_longer_than_the_canvas_limit_is_refused():
    with pytest.raises(ValueError, match="canvas is 140 positions long"):
        small_model(length="ctc")(input_ids=torch.full((1, 70), 7))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("refinement", REFINEMENTS)
@pytest.mark.parametrize("where", ["encoder", "transition", "shared", "length_head"])
def test_nan_in_the_weights_raises_an_error(refinement, where, training):
    model = small_model(refinement=refinement).train(training)
    parameters = list(getattr(model.model, where).parameters())
    parameters[0].data[..., 0] = float("nan")
    with pytest.raises(FloatingPointError, match="finite|The loss is nan"):
        model(**labelled())
    if where != "shared":
        with pytest.raises(FloatingPointError, match="finite"), torch.no_grad():
            model.model(input_ids=labelled()["input_ids"])


def test_expanding_transition_returns_a_finite_unconverged_result():
    model = small_model(refinement="implicit", layer_norm="pre")
    for parameter in model.model.transition.parameters():
        parameter.data.mul_(30)
    with torch.no_grad():
        out = model(input_ids=padded(random_sentences(4)), tol=1e-6)
    assert out.logits.isfinite().all()
    assert not out.converged.all()
    assert (out.residual[~out.converged] >= 1e-6).all()


def test_pushed_folder_contains_complete_model(tmp_path, monkeypatch):
    """Everything but the network is real; the commit is inspected instead of sent."""
    sent = {}

    class Offline(HfApi):
        def create_repo(self, repo_id, **rest):
            return SimpleNamespace(repo_id=repo_id)

        def create_commit(self, repo_id, operations, **rest):
            for operation in operations:
                with operation.as_file() as file:
                    sent[operation.path_in_repo] = file.read()

    monkeypatch.setattr(hub, "hf_api", Offline)
    monkeypatch.setattr(hub.ModelCard, "load", classmethod(lambda cls, repo, **rest: cls("---\ntags: []\n---\n")))
    small_model(torch.float32).push_to_hub("someone/deqnar", token="none")
    assert {"config.json", "model.safetensors", "modeling_deqnar.py", "fixed_point.py", "stability.py"} <= set(sent)
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name, content in sent.items():
        (folder / name).write_bytes(content)
    assert json.loads((folder / "config.json").read_text())["auto_map"]["AutoModelForSeq2SeqLM"]
    loaded = DeqNarForConditionalGeneration.from_pretrained(folder)
    expected = small_model(torch.float32)
    with torch.no_grad():
        tokens = padded(random_sentences(2))
        assert torch.equal(loaded.eval()(input_ids=tokens).logits, expected(input_ids=tokens).logits)


def test_missing_weight_is_initialised_and_others_are_loaded(tmp_path):
    """Loading a stacked backbone into a mixed model: the fusion is new, nothing else may change."""
    stacked = small_model(torch.float32, refinement="stacked")
    stacked.save_pretrained(tmp_path)
    overrides = {"refinement": "mixed", "transition_layers": 2, "weight_norm": "none"}
    mixed = DeqNarForConditionalGeneration.from_pretrained(tmp_path, **overrides)
    for name, tensor in stacked.state_dict().items():
        assert torch.equal(mixed.state_dict()[name], tensor), name
    fusion = mixed.model.transition.fusion[0].weight
    bound = math.sqrt(6 / sum(fusion.shape))
    assert 0.5 * bound < fusion.abs().max() <= bound


def test_classes_have_the_attributes_that_transformers_expects():
    model = small_model()
    assert isinstance(model, PreTrainedModel)
    assert isinstance(model.base_model, DeqNarModel)
    assert model.get_input_embeddings() is model.model.shared
    assert model.get_output_embeddings() is model.lm_head
    tokens = padded(random_sentences(3))
    with torch.no_grad():
        encoded = model.get_encoder()(input_ids=tokens, attention_mask=tokens != PAD)
        again = model(encoder_outputs=encoded, attention_mask=tokens != PAD)
        assert torch.equal(again.logits, model(input_ids=tokens).logits)
        model.config.return_dict = False
        assert isinstance(model(input_ids=tokens), tuple)


@pytest.mark.parametrize("kind", ["one_step", "phantom", "ift", "unrolled"])
@pytest.mark.parametrize("refinement", ["implicit", "explicit", "mixed"])
def test_autocast_leaves_the_solver_in_fp32(refinement, kind):
    model = small_model(torch.float32, refinement=refinement, gradient=kind).train()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(**labelled())
    out.loss.backward()
    assert out.residual.dtype == torch.float32
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("saved", ["none", "weight"])
@pytest.mark.parametrize("wanted", ["weight", "spectral", "none"])
def test_loading_with_another_weight_norm_is_refused(tmp_path, saved, wanted):
    small_model(torch.float32, weight_norm=saved).save_pretrained(tmp_path)
    if wanted == saved:
        assert DeqNarForConditionalGeneration.from_pretrained(tmp_path, weight_norm=wanted)
    else:
        with pytest.raises(ValueError, match=f"was not saved with weight_norm='{wanted}'"):
            DeqNarForConditionalGeneration.from_pretrained(tmp_path, weight_norm=wanted)


def test_configuration_overrides_are_validated(tmp_path):
    small_model(torch.float32).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="tol must be above 0"):
        DeqNarForConditionalGeneration.from_pretrained(tmp_path, tol=-1.0)
    assert DeqNarForConditionalGeneration.from_pretrained(tmp_path, length="ctc").config.copies_source


@pytest.mark.parametrize("length", ["predict", "ctc"])
def test_additional_padding_of_labels_has_no_effect(length):
    model, batch = small_model(length=length), labelled()
    wider = torch.nn.functional.pad(batch["labels"], (0, 3), value=-100)
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).loss, model(input_ids=batch["input_ids"], labels=wider).loss)


def test_target_longer_than_its_ctc_canvas_is_excluded_from_the_loss():
    model = small_model(length="ctc")
    source, target = torch.tensor([[7, 8], [7, PAD]]), torch.tensor([[9, 10, 11], [9, 10, 11]])
    with torch.no_grad():
        both = model(input_ids=source, labels=target).loss
        fitting = model(input_ids=source[:1], labels=target[:1]).loss
        assert model(input_ids=source[1:, :1], labels=target[1:]).loss == 0
    torch.testing.assert_close(both, fitting)


def test_unrolled_model_respects_max_nfe_and_calls_the_observer():
    model, recorded = small_model(gradient="unrolled", gradient_steps=6), []
    tokens = padded(random_sentences(3))
    assert model(input_ids=tokens).nfe.tolist() == [6, 6, 6]
    assert model(input_ids=tokens, max_nfe=2).nfe.tolist() == [2, 2, 2]
    for fields in ({"gradient": "unrolled"}, {"refinement": "stacked"}, {"refinement": "explicit", "max_nfe": 1}):
        other = small_model(**fields)
        source = other.prepare(tokens)
        canvas = other.lay_out(source, lengths=source.lengths)
        recorded.clear()
        found = other.solve(source, canvas, observe=lambda *step: recorded.append(step), keep_trajectory=True)
        assert len(recorded) == len(found.trajectory) == int(found.nfe.max())


@pytest.mark.parametrize("refinement", REFINEMENTS)
@pytest.mark.parametrize("options", [{"max_nfe": 0}, {"solver": "newton"}, {"tol": 0.0}])
def test_invalid_solver_options_are_refused_for_every_refinement(refinement, options):
    with pytest.raises(ValueError, match="max_nfe|solver|tol"):
        small_model(refinement=refinement)(input_ids=torch.tensor([[7, 8]]), **options)


def test_jacobian_penalty_of_the_model_has_gradients():
    model, tokens = small_model().train(), padded(random_sentences(3))
    source = model.prepare(tokens)
    canvas = model.lay_out(source, lengths=source.lengths)
    found = model.solve(source, canvas)
    penalty = jacobian_penalty(found.function, found.state, canvas.mask)
    penalty.backward()
    assert penalty > 0
    assert model.model.transition.layers[0].feed_forward.expand.weight.grad.abs().sum() > 0


OPTIONS = [
    {"damping": 0.3, "max_nfe": 3},
    {"memory": 1, "max_nfe": 6},
    {"scale_embedding": False},
    {"activation_function": "gelu"},
    {"source_copy": "uniform"},
    {"layer_norm": "pre"},
    {"weight_norm": "weight", "weight_norm_clip": 0.5},
    {"length": "ctc", "ctc_upsampling": 3},
]


@pytest.mark.parametrize("fields", OPTIONS)
def test_an_option_has_an_effect(fields):
    """The same random weights, one option changed."""
    tokens, defaults = padded(random_sentences(3)), {"memory": 5, "damping": 1.0, "max_nfe": 6}
    base = {key: value for key, value in fields.items() if key in ("max_nfe", "length")}
    usual, changed = small_model(**{**defaults, **base}), small_model(**{**defaults, **fields})
    with torch.no_grad():
        actual, expected = usual(input_ids=tokens), changed(input_ids=tokens)
    if "ctc_upsampling" in fields:
        assert expected.logits.shape[1] == actual.logits.shape[1] * 3 // 2
    else:
        width = min(actual.logits.shape[1], expected.logits.shape[1])
        assert (actual.logits[:, :width] - expected.logits[:, :width]).abs().max() > 1e-6


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("phantom", {"gradient_damping": 0.9}), ("ift", {"gradient_solver": "picard", "gradient_max_nfe": 2})],
)
def test_a_gradient_option_has_an_effect(kind, fields):
    def gradient(**fields) -> torch.Tensor:
        model = small_model(gradient=kind, **fields)
        model(**labelled()).loss.backward()
        return model.model.transition.layers[0].feed_forward.expand.weight.grad

    assert (gradient(**fields) - gradient()).abs().max() > 1e-7


def test_loss_terms_have_their_weights():
    def loss(**fields) -> float:
        model = small_model(**fields)
        if model.model.latent_head is not None:
            model.model.latent_head.posterior.weight.data.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            out = model(**labelled())
        parts = {"length": out.length_logits, "kl": out.latent_kl}
        return out.loss.item(), parts

    without, parts = loss(length_loss_factor=0.0)
    lengths = (labelled()["labels"] >= 0).sum(dim=1)
    length_loss = small_model().model.length_head.loss(parts["length"], lengths, lengths).item()
    assert loss(length_loss_factor=2.0)[0] == pytest.approx(without + 2 * length_loss)
    free, parts = loss(latent="vae", latent_kl_factor=0.0, length_loss_factor=0.0)
    charged, _ = loss(latent="vae", latent_kl_factor=3.0, length_loss_factor=0.0)
    assert charged == pytest.approx(free + 3 * (parts["kl"].sum() / lengths.sum()).item())


@pytest.mark.parametrize("dropout", [1e-9, 0.1, 0.5, 0.9])
def test_dropout_masks_have_the_requested_probability(dropout):
    kept = draw_dropout_mask(torch.zeros(1, dtype=torch.float64), (1001, 3, 7, 13), dropout)  # not a multiple of four
    assert (kept == 0).double().mean() == pytest.approx(dropout, abs=0.005)
    assert kept.max() == pytest.approx(1 / (1 - dropout), rel=1e-4)
    neighbours = ((kept == 0).double() - dropout).flatten()
    assert (neighbours[1:] * neighbours[:-1]).mean() == pytest.approx(0, abs=0.005)


def test_fixed_dropout_masks_preserve_the_mean_and_follow_selected_rows():
    model = small_model(dropout=0.4).train()
    injection = torch.zeros(8, 40, 32, dtype=torch.float64)
    (kept,) = model.model.transition.draw_dropout_masks(injection)
    assert kept.unique().tolist() == pytest.approx([0, 1 / 0.6], rel=1e-4)
    assert kept.mean() == pytest.approx(1, abs=0.05)
    tokens = padded(random_sentences(8, shortest=2, longest=40))
    mask, source = tokens != PAD, model.prepare(tokens)
    bound = model.model.bind(source, model.lay_out(source, lengths=source.lengths))
    full = bound(torch.zeros_like(bound.context.injection))
    rows = torch.tensor([2, 5])
    narrowed = bound.select(rows).trim(int(mask.sum(dim=1)[rows].max()))
    part = narrowed(torch.zeros_like(narrowed.context.injection))
    for place, row in enumerate(rows.tolist()):
        length = int(mask[row].sum())
        torch.testing.assert_close(part[place, :length], full[row, :length])


def test_latent_head_samples_in_training_and_ignores_target_padding():
    model = small_model(latent="vae", length="ctc", dropout=0.0)
    head = model.model.latent_head
    head.posterior.weight.data.normal_(std=0.3)
    memory, target = torch.randn(1, 4, 32, dtype=torch.float64), torch.randn(1, 5, 32, dtype=torch.float64)
    mask, target_mask = torch.ones(1, 4, dtype=torch.bool), torch.arange(5)[None] < 3
    recorded, divergence = head(memory, mask, target, target_mask)
    junk = target.masked_fill(~target_mask[:, :, None], 100.0)
    torch.testing.assert_close(head(memory, mask, junk, target_mask)[1], divergence)
    assert torch.equal(head(memory, mask, target, target_mask)[0], recorded)
    head.train()
    assert not torch.equal(head(memory, mask, target, target_mask)[0], head(memory, mask, target, target_mask)[0])


def test_state_of_an_explicit_model_is_an_expected_embedding():
    model, tokens = small_model(refinement="explicit", tol=1e-10, max_nfe=60), padded(random_sentences(2))
    with torch.no_grad():
        out = model(input_ids=tokens)
        embeddings = model.model.shared.weight * math.sqrt(32)
        expected = out.logits.softmax(dim=-1) @ embeddings
    torch.testing.assert_close(out.state[out.canvas_mask], expected[out.canvas_mask], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("length", [1, 2, 3, 28, 64, 65])
def test_position_table_equals_computed_positions_for_any_length(length):
    arguments = (length, 32, torch.device("cpu"), torch.float32)
    assert torch.equal(position_table(*arguments), sinusoidal_positions(*arguments))


def test_position_table_created_in_inference_mode_can_be_used_in_training():
    _position_table.cache_clear()
    with torch.inference_mode():
        assert not position_table(5, 32, torch.device("cpu"), torch.float32).is_inference()


def test_the_bundled_model_compiles_for_inference_and_training():
    """Tiny models compile where real ones fail, so this one is the bundled model."""
    model, tokenizer = (load.from_pretrained(PRETRAINED) for load in (AutoModelForSeq2SeqLM, AutoTokenizer))
    batch = tokenizer(["Where is the station?", "I like coffee."], return_tensors="pt", padding=True)
    labels = tokenizer(["Wo ist der Bahnhof?", "Ich mag Kaffee."], return_tensors="pt", padding=True).input_ids
    labels = labels.masked_fill(labels == tokenizer.pad_token_id, -100)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(**batch, labels=labels).loss, model(**batch, labels=labels).loss)
    compiled(**batch, labels=labels).loss.backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    model(**batch, labels=labels).loss.backward()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-3, atol=1e-5)
