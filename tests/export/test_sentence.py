import io

import onnx
import pytest
import torch

from hf_deqnar.export.sentence import WIDEST_BEAM
from hf_deqnar.models.deqnar.streaming import TerminalStreamer

from .conftest import KINDS

AT_ONCE = ["implicit", "mixed with a shortlist", "self-conditioned", "stacked"]
# Options that the sentence graph supports, and options for which other graphs are used.
ITS_OWN = [
    {"max_nfe": 1},
    {"max_nfe": 2, "tol": 1e-6},
    {"solver": "picard", "tol": 1e-2},
    {"solver": "picard", "max_nfe": 4},
    {"max_nfe": 2, "ctc_beam_size": 3},
    {"max_nfe": 1, "ctc_beam_size": WIDEST_BEAM},
    {"max_nfe": 2, "ctc_beam_size": 3, "ngram_weight": 0.5, "token_bonus": 0.5},
]
NOT_ITS_OWN = [
    {"refinement_passes": 2},
    {"max_nfe": 2, "ctc_beam_size": WIDEST_BEAM + 1},
    {"max_nfe": 2, "ctc_beam_size": 2, "num_return_sequences": 2},
    {"return_dict_in_generate": True},
]


@pytest.fixture
def calls(monkeypatch):
    """A function: exported model → a list that grows with every call of its sentence graph."""

    def watch(exported) -> list:
        recorded, graph = [], exported.sentence
        monkeypatch.setattr(exported, "sentence", lambda *inputs: (recorded.append(inputs), graph(*inputs))[1])
        return recorded

    return watch


def sentences(batch) -> list[torch.Tensor]:
    return [row[: int(mask.sum())][None] for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]


@pytest.mark.slow
def test_only_supported_models_have_a_sentence_graph(loaded):
    supported = [*AT_ONCE, "graph"]
    assert [kind for kind in KINDS if loaded(kind, "fp32")[1].sentence is not None] == sorted(
        supported, key=list(KINDS).index
    )


@pytest.mark.parametrize("kind", AT_ONCE)
def test_sentence_graph_agrees_with_solver(loaded, batch, calls, kind):
    model, exported = loaded(kind, "fp32")
    recorded = calls(exported)
    for number, options in enumerate(ITS_OWN):
        for source in sentences(batch):
            found = exported.generate(source, **options)
            solved = model.generate(source, **options)
            assert torch.equal(found, solved), options
        assert len(recorded) == (number + 1) * len(batch["input_ids"])


@pytest.mark.parametrize("kind", ["implicit", "mixed with a shortlist"])
def test_evaluations_and_residuals_agree_with_solver(loaded, batch, kind):
    model, exported = loaded(kind, "fp32")
    compared = 0
    for source in sentences(batch):
        inputs = {"input_ids": source, "max_nfe": torch.tensor(9), "tol": torch.tensor(2e-2)}
        if model.model.shortlist is not None:
            words = exported.model._words(source, torch.ones_like(source, dtype=torch.bool), shortlist=True)
            inputs |= {"words": words.tokens, "outside": words.outside}
        residual, before, nfe = exported.sentence(inputs, ["residual", "residual_before", "nfe"])
        if not residual < before:  # a mixed model with random weights may cycle
            continue
        compared += 1
        options = {"solver": "picard", "max_nfe": 9, "tol": 2e-2, "return_dict_in_generate": True}
        solved = model.generate(source, **options)
        assert int(nfe) == int(solved.nfe)
        assert float(residual) == pytest.approx(float(solved.residual), rel=0.01)
    assert compared >= (len(sentences(batch)) if kind == "implicit" else 1)


@pytest.mark.parametrize("kind", AT_ONCE)
def test_unsupported_options_use_the_other_graphs(loaded, batch, calls, tokenizer, kind):
    _, exported = loaded(kind, "fp32")
    recorded = calls(exported)
    others = NOT_ITS_OWN if kind == "stacked" else [*NOT_ITS_OWN, {"solver": "anderson"}, {"stop_on_stable_tokens": 1}]
    for options in others:
        exported.generate(sentences(batch)[0], **options)
    drafts = io.StringIO()
    exported.generate(sentences(batch)[0], max_nfe=2, streamer=TerminalStreamer(tokenizer, drafts))
    assert drafts.getvalue()
    assert not recorded


@pytest.mark.slow
def test_unknown_solver_is_refused(loaded, batch):
    for kind in AT_ONCE:
        with pytest.raises(ValueError, match="Unknown solver 'andersen'"):
            loaded(kind, "fp32")[1].generate(sentences(batch)[0], solver="andersen", max_nfe=2)


def test_int8_graph_is_completely_quantised(exported):
    _, folders = exported("implicit")
    graph = onnx.load(folders["int8"] / "sentence.onnx").graph
    (loop,) = (node for node in graph.node if node.op_type == "Loop")
    (body,) = (attribute.g for attribute in loop.attribute if attribute.name == "body")
    for part in (graph, body):
        weights = {one.name for one in part.initializer}
        products = [node for node in part.node if node.op_type in ("MatMul", "Gemm")]
        assert not [node for node in products if weights & set(node.input)]
        assert any(node.op_type == "MatMulIntegerToFloat" for node in part.node)


def test_growing_residual_falls_back_to_the_general_solver(loaded, batch, monkeypatch):
    model, exported = loaded("implicit", "fp32")
    source, options = sentences(batch)[0], {"solver": "picard", "tol": 1e-2}
    wrong = torch.full((1, 2 * source.shape[1]), 7)
    for residual in (0.9, float("nan")):
        monkeypatch.setattr(
            exported, "sentence", lambda *_, size=residual: [wrong, torch.tensor([size]), torch.tensor([0.5])]
        )
        assert torch.equal(exported.generate(source, **options), model.generate(source, **options))


@pytest.mark.parametrize("options", [{"max_nfe": 2}, {"solver": "picard", "tol": 0.05}], ids=["two", "converged"])
@pytest.mark.parametrize("kind", AT_ONCE)
def test_int8_translation_does_not_depend_on_batch(loaded, batch, calls, kind, options):
    _, exported = loaded(kind, "int8")
    recorded = calls(exported)
    single = [exported.generate(source, **options)[0].tolist() for source in sentences(batch)]
    order = torch.randperm(len(single)).tolist()
    batched = exported.generate(batch["input_ids"][order], attention_mask=batch["attention_mask"][order], **options)
    padding = exported.config.pad_token_id
    for place, row in enumerate(order):
        text = single[row]
        assert batched[place].tolist() == text + [padding] * (batched.shape[1] - len(text))
    # One call for every length; models that feed probabilities over a shortlist back have one for every sentence.
    groups = len(set(batch["attention_mask"].sum(dim=1).tolist())) if "shortlist" not in KINDS[kind] else len(single)
    assert len(recorded) == len(single) + groups
    assert groups < len(single) or "shortlist" in KINDS[kind]


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_figures_of_a_row_do_not_depend_on_the_others(loaded, batch, precision):
    _, exported = loaded("implicit", precision)
    lengths = batch["attention_mask"].sum(dim=1)
    length = lengths.mode().values
    rows = batch["input_ids"][lengths == length, :length]
    assert len(rows) > 1
    names, counts = ["residual", "residual_before", "nfe", "log_probabilities"], set()
    for tol in torch.logspace(-0.5, -2.5, 40):
        limits = {"max_nfe": torch.tensor(12), "tol": tol}
        together = exported.sentence({"input_ids": rows, **limits}, names)
        counts.add(tuple(together[2].tolist()))
        for number in range(len(rows)):
            alone = exported.sentence({"input_ids": rows[number : number + 1], **limits}, names)
            for one, joint in zip(alone, together, strict=True):
                assert torch.equal(one[0], joint[number])
    assert any(len(set(found)) > 1 for found in counts), "rows converge after different numbers of evaluations"


def test_long_texts_are_truncated_and_empty_ones_are_one_padding_token(loaded, batch, monkeypatch):
    model, exported = loaded("implicit", "fp32")
    source = sentences(batch)[0]
    for options in ({"max_nfe": 2, "max_length": 1}, {"max_nfe": 2, "max_length": 1, "ctc_beam_size": 3}):
        assert torch.equal(exported.generate(source, **options), model.generate(source, **options))
    blank = torch.full((1, 2 * source.shape[1]), model.config.blank_token_id)
    monkeypatch.setattr(exported, "sentence", lambda *_: [blank, torch.tensor([0.1]), torch.tensor([0.5])])
    assert exported.generate(source, max_nfe=2).tolist() == [[model.config.pad_token_id]]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_graphs_are_read_in_one_call(loaded, batch, calls, precision):
    model, exported = loaded("graph", precision)
    recorded, rows = calls(exported), sentences(batch)
    searches = [{"dag_search": "greedy"}, {}, {"dag_beta": 0.3}, {"dag_search": "viterbi"}, {"deduplicate": True}]
    for number, options in enumerate(searches, start=1):
        found = [exported.generate(source, max_nfe=2, **options) for source in rows]
        assert len(recorded) == number * len(rows)
        if precision == "fp32":
            assert all(
                torch.equal(one, model.generate(source, max_nfe=2, **options))
                for one, source in zip(found, rows, strict=True)
            )
    before = len(recorded)
    for source in rows:
        beam = exported.generate(source, max_nfe=2, dag_beam_size=3)
        if precision == "fp32":
            assert torch.equal(beam, model.generate(source, max_nfe=2, dag_beam_size=3))
    assert len(recorded) == before  # other graphs
