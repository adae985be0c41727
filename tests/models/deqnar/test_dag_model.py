"""Models with `length="dag"`: their loss, objectives, decoding and errors."""

import pytest
import torch

from hf_deqnar import DeqNarConfig, DeqNarForConditionalGeneration
from hf_deqnar.data.ngram_counts import add_ngrams
from hf_deqnar.data.tokenized_dataset import NO_CANVAS, VALID, drop_reason
from hf_deqnar.evaluation.mple_report import measure_losses
from hf_deqnar.models.deqnar import losses_deqnar
from hf_deqnar.models.deqnar.dag import GatedLinks, dag_loss, fuzzy_overlap
from hf_deqnar.models.deqnar.lengths import DagLength
from hf_deqnar.models.deqnar.losses_deqnar import OwnWords, Targets, dag_total, emitted_scores, fuzzy_total
from hf_deqnar.models.deqnar.shortlist import never_written
from hf_deqnar.objectives.input_predictor import fit_input_predictor
from hf_deqnar.objectives.objective import parse_objective
from hf_deqnar.objectives.states import SupervisedStates
from hf_deqnar.training.base_trainer import canvas_limit

from ...conftest import padded, random_sentences, self_conditioned_model, small_config, small_model

SEARCHES = [
    {"dag_search": "greedy"},
    {},
    {"dag_beta": 0.3},
    {"dag_search": "viterbi", "dag_length_penalty": 0.5},
    {"dag_beam_size": 3},
]


def graph_model(**fields) -> DeqNarForConditionalGeneration:
    """A model whose links differ clearly."""
    make = self_conditioned_model if "self_conditioning" in fields else small_model
    model = make(**{"length": "dag", "dag_upsampling": 3, "dag_link_heads": 2, **fields})
    model.model.link_head.query_key.weight.data.mul_(4)
    return model


def batch(rows: int = 5, shortest: int = 3, longest: int = 8) -> dict[str, torch.Tensor]:
    source, target = (random_sentences(rows, shortest, longest, seed=seed) for seed in (1, 2))
    return {"input_ids": padded(source), "labels": padded(target, -100)}


def problem():
    """Features, projection, links and targets; the third target is too long, and two words of others are revealed."""
    lengths = torch.tensor([9, 6, 4, 5])
    labels = padded([[7, 8, 9], [6, 7, 6, 7, 6], [8, 8, 8, 9], [11]], -100)
    mask = torch.arange(9)[None] < lengths[:, None]
    features = torch.randn(4, 9, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(20, 6, dtype=torch.float64, requires_grad=True)
    logits = torch.randn(4, 2, 9, 9, dtype=torch.float64)
    links = GatedLinks.apply(logits, torch.full((4, 2, 9), 0.5, dtype=torch.float64).log(), mask).requires_grad_()
    revealed, shown = torch.zeros_like(mask), torch.full(mask.shape, 4)
    for row, vertex, word in ((0, 4, 8), (1, 2, 7)):
        revealed[row, vertex], shown[row, vertex] = True, word
    return features, weight, links, mask, labels, revealed, shown


@pytest.mark.parametrize("chunk", [1, 10**9], ids=["one by one", "all at once"])
@pytest.mark.parametrize("reveals", [False, True])
def test_loss_in_chunks_is_the_loss_of_full_logits(monkeypatch, chunk, reveals):
    monkeypatch.setattr(losses_deqnar, "CHUNK", chunk)
    features, weight, links, mask, labels, revealed, shown = problem()
    lengths, canvas = (labels >= 0).sum(dim=1), mask.sum(dim=1)
    log_probs = (features @ weight.T).log_softmax(dim=-1)
    if reveals:  # without a gradient at revealed vertices
        log_probs = torch.where(revealed[:, :, None], log_probs.detach(), log_probs)
    own = OwnWords.of(labels, 0)
    scores = log_probs.gather(2, own.words[:, None].expand(-1, 9, -1))
    allowed = labels[:, :, None] == shown[:, None]
    emitted = emitted_scores(scores, own.labels, *((revealed, allowed) if reveals else ()))
    losses, fits = dag_loss(emitted, links, canvas, lengths + 1)
    assert fits.tolist() == [True, True, False, True]

    targets = Targets(labels, mask, revealed if reveals else None, shown=shown)
    total, predicted, expected = dag_total(features, links, weight, targets, fits, predict=True)
    torch.testing.assert_close(total, losses.sum())
    assert torch.equal(predicted.tokens[mask], (features @ weight.T).argmax(dim=-1)[mask])
    full = (features @ weight.T).softmax(dim=-1) @ weight
    torch.testing.assert_close(expected[mask], full[mask].detach())
    inputs = (features, weight, links)
    found, plain = (torch.autograd.grad(2 * loss, inputs) for loss in (total, losses.sum()))
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other)


def test_overlap_in_chunks_is_that_of_full_logits(monkeypatch):
    monkeypatch.setattr(losses_deqnar, "CHUNK", 50)
    features, weight, links, mask, labels, _, _ = problem()
    own = OwnWords.of(labels, 0)
    probabilities = (features @ weight.T).softmax(dim=-1).gather(2, own.words[:, None].expand(-1, 9, -1))
    expected = (1 - fuzzy_overlap(probabilities * mask[:, :, None], links, own.labels)[0]).sum()
    total = fuzzy_total(features, links, weight, Targets(labels, mask), own)
    torch.testing.assert_close(total, expected)
    found, plain = (torch.autograd.grad(loss, (features, weight)) for loss in (total, expected))
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["loss", "overlap_loss"])
def test_autocast_rounds_the_projections_only(name):
    """Loss and gradients of a bfloat16 autocast agree with those without it up to the precision of bfloat16."""
    model = graph_model(refinement="stacked").float()
    rows = batch(rows=3, shortest=4)
    found = {}
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            source = model.prepare(rows["input_ids"])
            canvas = model.lay_out(source)
            features = model.solve(source, canvas).value
            targets = Targets(rows["labels"], canvas.mask)
            total, count = getattr(model.length_model, name)(model, features, targets)
        assert total.dtype == torch.float32
        model.zero_grad()
        (total / count).backward()
        found[enabled] = total / count, model.lm_head.weight.grad, model.model.link_head.query_key.weight.grad
    for rounded, exact in zip(found[True], found[False], strict=True):
        assert exact.norm() > 0
        assert (rounded - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("options", SEARCHES)
@pytest.mark.parametrize("fields", [{"refinement": "stacked"}, {"self_conditioning": "expected", "max_nfe": 40}])
def test_translation_does_not_depend_on_batch(fields, options):
    model, sentences = graph_model(**fields), random_sentences(6, longest=9)
    together = model.generate(padded(sentences, extra=3), return_dict_in_generate=True, **options)
    for row, sentence in enumerate(sentences):
        alone = model.generate(padded([sentence]), return_dict_in_generate=True, **options)
        length = int((alone.sequences[0] != 1).sum())
        assert together.sequences[row, :length].tolist() == alone.sequences[0, :length].tolist()
        assert (together.sequences[row, length:] == 1).all()
        torch.testing.assert_close(together.sequences_scores[row], alone.sequences_scores[0])


def test_searches_find_texts_of_the_score_they_report():
    """The score of a path is Σ log E + log P over its vertices; the beam's is log of the sum over all paths."""
    model, source = graph_model(refinement="stacked"), padded(random_sentences(3, shortest=2, longest=3))
    out = model(input_ids=source)
    log_probs = out.logits.index_fill(2, torch.tensor(never_written(model.config)), float("-inf")).log_softmax(dim=-1)
    links = model.model.link_head(out.last_hidden_state, out.canvas_mask)
    canvas = out.canvas_mask.sum(dim=1)
    for options in SEARCHES:
        found = model.generate(source, return_dict_in_generate=True, **options)
        counts = (found.sequences != 1).sum(dim=1)
        labels = found.sequences.masked_fill(found.sequences == 1, -100)
        scores = log_probs.gather(2, labels.clamp_min(0)[:, None].expand(-1, log_probs.shape[1], -1))
        emitted = torch.cat([torch.zeros_like(scores[:, :, :1]), scores], dim=2).transpose(1, 2)
        losses, fits = dag_loss(emitted, links, canvas, counts + 1)
        assert fits.all()
        summed = -losses / counts
        if "dag_beam_size" in options:
            torch.testing.assert_close(found.sequences_scores, summed.to(found.sequences_scores.dtype))
        else:  # one of the paths
            assert (found.sequences_scores <= summed + 1e-5).all()
            torch.testing.assert_close(found.token_scores.sum(dim=1) / counts, found.sequences_scores)


def test_beam_is_at_least_as_likely_as_a_path():
    model, source = graph_model(refinement="stacked"), padded(random_sentences(5, longest=6))
    viterbi = model.generate(source, dag_search="viterbi", return_dict_in_generate=True)
    beam = model.generate(source, dag_beam_size=20, return_dict_in_generate=True)
    assert (beam.sequences_scores >= viterbi.sequences_scores.float() - 1e-6).all()


def test_length_penalty_makes_texts_longer():
    model, source = graph_model(refinement="stacked"), padded(random_sentences(6, shortest=5))
    lengths = [
        int((model.generate(source, dag_search="viterbi", dag_length_penalty=penalty) != 1).sum())
        for penalty in (0.0, 1.0, 3.0)
    ]
    assert lengths[0] < lengths[1] <= lengths[2]


def test_several_texts_are_different_and_can_be_reranked():
    model, source = graph_model(refinement="stacked"), padded(random_sentences(2, shortest=4))
    found = model.generate(source, dag_beam_size=4, num_return_sequences=3, return_dict_in_generate=True)
    texts = [tuple(row) for row in found.sequences.tolist()]
    assert len(set(texts[:3])) == len(set(texts[3:])) == 3
    assert found.sequences_scores[:3].tolist() == sorted(found.sequences_scores[:3].tolist(), reverse=True)


def test_ngrams_take_part_in_the_beam_search():
    model, source = graph_model(refinement="stacked"), padded(random_sentences(3, shortest=4))
    plain = model.generate(source, dag_beam_size=5)
    word = int(plain.flatten().mode().values)
    add_ngrams(model, [[word] * 9 + [2]] * 3, order=2, least=1, weight=1.0, bonus=3.0)
    assert model.generation_config.dag_beam_size == 5
    fluent = model.generate(source)
    assert int((fluent == word).sum()) > int((plain == word).sum())
    assert torch.equal(model.generate(source, dag_beam_size=1), model.generate(source, num_beams=1))
    model.model.ngrams.first_chances = model.model.ngrams.first_chances[:-1]
    with pytest.raises(ValueError, match="of another vocabulary"):
        model.generate(source)


def test_equal_neighbours_are_merged_on_request():
    lengths = DagLength(small_config(length="dag"))
    tokens, mask = torch.tensor([[5, 8, 5, 8, 9, 5, 9, 8]]), torch.ones(1, 8, dtype=torch.bool)
    for merge, expected in ((False, [8, 8, 9, 9, 8]), (True, [8, 9, 8])):
        assert tokens[lengths.text_positions(tokens, mask, merge_repetitions=merge)].tolist() == expected


def test_saved_model_translates_identically(tmp_path):
    model, source = graph_model(refinement="stacked").float(), padded(random_sentences(3))
    model.generation_config.update(dag_search="viterbi", dag_length_penalty=0.7)
    model.save_pretrained(tmp_path)
    loaded = DeqNarForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.generation_config.dag_length_penalty == 0.7
    assert torch.equal(loaded.generate(source), model.generate(source))


def test_equilibrium_model_starts_as_its_backbone():
    backbone, source = graph_model(refinement="stacked"), padded(random_sentences(3))
    model = DeqNarForConditionalGeneration.from_backbone(backbone)
    assert torch.equal(model.generate(source, max_nfe=1), backbone.generate(source))


@pytest.mark.parametrize("overlap", [0.0, 1.0])
@pytest.mark.parametrize("name", ["dag", "dag+glat", "dag+cmlm"])
@pytest.mark.parametrize("refinement", ["stacked", "implicit", "explicit"])
def test_objectives_reach_all_parameters(refinement, name, overlap):
    model = graph_model(refinement=refinement, max_nfe=6).train()
    terms = parse_objective(name, overlap=overlap)(model, batch())
    terms["loss"].backward()
    assert terms["excluded"] == 0
    without = [key for key, one in model.named_parameters() if one.grad is None or not one.grad.any()]
    assert [key for key in without if "feedback" not in key] == []


def test_glancing_reveals_rounded_shares_of_the_best_path_under_one_dropout(monkeypatch):
    model, one = graph_model(refinement="stacked", dropout=0.3).train(), batch(rows=20)
    objective, drawn = parse_objective("dag+glat"), []
    original = type(model.model.transition).draw_dropout_masks
    monkeypatch.setattr(
        type(model.model.transition),
        "draw_dropout_masks",
        lambda self, injection: drawn.append(original(self, injection)) or drawn[-1],
    )
    source = model.prepare(one["input_ids"])
    for progress, share in ((0.0, 0.5), (1.0, 0.1)):
        proxy = objective.choose_proxy(model, source, one["labels"], progress, torch.Generator().manual_seed(0))
        model.solve(proxy.source, proxy.canvas)
        first, second = drawn[-2:]
        assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
        assert proxy.target_mask.sum(dim=1).tolist() == (one["labels"] >= 0).sum(dim=1).tolist()
        assert not (proxy.revealed & ~proxy.target_mask).any()
        errors = proxy.errors.sum(dim=1)
        assert proxy.revealed.sum(dim=1).tolist() == [int(share * count + 0.5 + 1e-6) for count in errors.tolist()]
        for row in range(20):  # what stands on the path is the target
            path = proxy.target_mask[row] & proxy.revealed[row]
            assert set(proxy.canvas.tokens[row][path].tolist()) <= set(one["labels"][row].tolist())


def test_self_conditioned_graphs_learn_from_several_states():
    model = graph_model(self_conditioning="expected", max_nfe=4).train()
    objective = parse_objective("dag", states=SupervisedStates(weights=(0.5, 0.5)), equilibrium=0.0)
    terms = objective(model, batch(), generator=torch.Generator().manual_seed(0))
    terms["loss"].backward()
    assert terms["state_2"].isfinite()
    assert model.model.transition.self_conditioning.feedback[0].weight.grad.any()
    assert model.model.link_head.query_key.weight.grad.any()


def test_expected_positions_are_fed_back():
    model, source = graph_model(self_conditioning="expected"), padded(random_sentences(2))
    with_places = model(input_ids=source, max_nfe=2).logits
    model.model.link_head = type(model.model.link_head)(model.config).double()
    assert not torch.allclose(model(input_ids=source, max_nfe=2).logits, with_places)


def test_a_small_model_learns_its_training_data():
    torch.manual_seed(0)
    model = DeqNarForConditionalGeneration(
        small_config(length="dag", dag_upsampling=3, refinement="stacked", dropout=0.0, source_copy="uniform")
    )
    one = batch(rows=6, shortest=4, longest=7)
    optimizer, objective = torch.optim.Adam(model.parameters(), lr=3e-3), parse_objective("dag+glat")
    model.train()
    losses = []
    for step in range(150):
        optimizer.zero_grad()
        loss = objective(model, one, progress=step / 150)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    model.eval()
    for options in ({"dag_search": "greedy"}, {}, {"dag_beam_size": 3}):
        found = model.generate(one["input_ids"], **options)
        expected = one["labels"].masked_fill(one["labels"] < 0, 1)
        same = sum(row.tolist() == other.tolist() for row, other in zip(found, expected, strict=False))
        assert same >= 5


def test_report_measures_graphs():
    model, one = graph_model(refinement="stacked"), batch()
    objective = parse_objective("dag+glat")
    fit_input_predictor(model, objective, [one], steps=5)
    losses = measure_losses(model, objective, [one])
    assert losses.nat > 0
    assert losses.tokens == int((one["labels"] >= 0).sum())


def test_targets_longer_than_the_graph_are_counted_and_excluded():
    model = graph_model(refinement="stacked")
    source, fitting, long = [7, 8], [9] * 5, [9] * 6
    limit = canvas_limit(model.config)
    assert drop_reason("a", "b", source, fitting, 40, limit) == VALID
    assert drop_reason("a", "b", source, long, 40, limit) == NO_CANVAS
    both = {"input_ids": padded([source, source]), "labels": padded([fitting, long], -100)}
    terms = parse_objective("dag+glat")(model, both, generator=torch.Generator().manual_seed(0))
    assert terms["excluded"] == 0.5
    assert terms["loss"].isfinite()
    alone = {"input_ids": padded([source]), "labels": padded([long], -100)}
    for overlap in (0.0, 1.0):
        assert parse_objective("dag", overlap=overlap)(model, alone)["loss"] == 0
    assert model(**alone).loss == 0


def test_sources_of_one_token_and_at_the_limit_are_translated():
    model = graph_model(refinement="stacked", max_position_embeddings=30)
    assert model.config.max_source_length == 10
    for length in (1, 10):
        for options in SEARCHES:
            text = model.generate(padded([[7] * length]), **options)
            assert 1 <= text.shape[1] < 3 * length
    with pytest.raises(ValueError, match="canvas is 33 positions long, but max_position_embeddings is 30"):
        model.generate(padded([[7] * 11]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length_beams": 3}, "length_beams=3 does not apply to a graph"),
        ({"ctc_beam_size": 3}, "use dag_beam_size"),
        ({"refinement_passes": 2}, "refinement_passes=2 does not apply to a graph"),
        ({"input_sampling": True}, "which is read once"),
        ({"dag_search": "best"}, "dag_search must be one of greedy, lookahead, viterbi"),
        ({"dag_search": "greedy", "dag_beta": 0.5}, "dag_beta=0.5 needs dag_search='lookahead'"),
        ({"dag_length_penalty": 0.5}, "dag_length_penalty=0.5 needs dag_search='viterbi' or dag_beam_size above 1"),
        ({"dag_beam_size": 2, "dag_search": "viterbi"}, "dag_search=viterbi has no effect with dag_beam_size above 1"),
        ({"dag_beam_size": 2, "deduplicate": True}, "deduplicate=True does not apply to the beam search of a graph"),
        ({"ngram_weight": 0.5, "dag_beam_size": 2}, "this model has no n-grams"),
        ({"num_return_sequences": 2}, "more than dag_beam_size=1"),
    ],
)
def test_options_that_do_not_apply_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        graph_model(refinement="stacked").generate(padded([[7, 8]]), **options)


@pytest.mark.parametrize("length", ["predict", "ctc"])
@pytest.mark.parametrize("options", [{"dag_search": "greedy"}, {"dag_beam_size": 2}])
def test_options_of_graphs_are_refused_by_other_models(length, options):
    with pytest.raises(ValueError, match=r"needs config.length='dag', but this"):
        small_model(length=length).generate(padded([[7, 8]]), **options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dag_upsampling": 1}, "dag_upsampling=1 must be at least 2"),
        ({"dag_upsampling": 0}, "dag_upsampling=0 must be at least 2"),
        ({"dag_link_heads": 3}, "d_model=32 is not a multiple of dag_link_heads=3"),
        ({"dag_link_heads": 0}, "dag_link_heads must be above 0"),
        ({"max_position_embeddings": 10}, "dag_upsampling=8 makes even short canvases longer than"),
    ],
)
def test_impossible_configurations_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        small_config(**{"length": "dag", **fields})


def test_objectives_of_other_length_models_are_refused():
    model, one = graph_model(refinement="stacked"), batch()
    with pytest.raises(ValueError, match="dag has its own alignment"):
        parse_objective("dag+axe")
    with pytest.raises(ValueError, match="label_smoothing=0.1 has no meaning for graphs"):
        parse_objective("dag", label_smoothing=0.1)(model, one)
    assert DeqNarConfig(length="dag").max_source_length == 128
