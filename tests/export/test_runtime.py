import shutil
import sys
import types

import pytest
import torch
from transformers import pipeline

from hf_deqnar import DeqNarOnnxModel
from hf_deqnar.export import runtime
from hf_deqnar.export.parity import agreement
from hf_deqnar.models.deqnar.streaming import TerminalStreamer

from ..conftest import SENTENCES
from ..models.deqnar.test_quality import make_quality
from .conftest import KINDS

ENGLISH = [english for english, _ in SENTENCES]


def lists(sequences: torch.Tensor, padding: int = 1) -> list[list[int]]:
    return [[token for token in row if token != padding] for row in sequences.tolist()]


def options_of(model) -> list[dict]:
    """Options of `generate` that this kind of model supports."""
    lengths = model.length_model
    beams = {lengths.beam_option: 3} | ({} if lengths.has_own_alignment else {"deduplicate": True})
    again = {} if lengths.reads_once else {"refinement_passes": 2}
    options = [{}, {**again, "max_nfe": 5}, {**beams, "num_return_sequences": 2}]
    if model.config.refinement != "stacked":
        options += [{"stop_on_stable_tokens": 2}, {"solver": "broyden", "tol": 1e-2}, {"max_nfe": 1}]
    if model.model.input_head is not None:
        options += [{"input_sampling": True}]
    if model.model.shortlist is not None:
        options += [{"shortlist": False}]
    return options


@pytest.mark.parametrize("kind", KINDS)
def test_quality_agrees_with_torch(loaded, batch, kind, tokenizer):
    model, exported = loaded(kind, "fp32")
    beam = model.length_model.beam_option
    for options in ({}, {beam: 3}):
        settings = {"quality": make_quality(len(tokenizer)), "return_dict_in_generate": True, **options}
        expected, actual = model.generate(**batch, **settings), exported.generate(**batch, **settings)
        assert lists(actual.sequences) == lists(expected.sequences)
        torch.testing.assert_close(actual.quality, expected.quality, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(actual.token_quality, expected.token_quality, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_states_agree_with_torch(loaded, batch, kind):
    model, exported = loaded(kind, "fp32")
    mask = batch["attention_mask"].bool()
    with torch.no_grad():
        actual, expected = (
            exported.prepare(batch["input_ids"], mask, shortlist=True),
            model.prepare(batch["input_ids"], mask, shortlist=True),
        )
        inside = mask[:, None, :, None]
        for (key, value), (other_key, other_value) in zip(actual.keys_values, expected.keys_values, strict=True):
            torch.testing.assert_close(key * inside, other_key * inside, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(value * inside, other_value * inside, rtol=1e-4, atol=1e-5)
        if model.config.length == "predict":
            torch.testing.assert_close(actual.length_logits, expected.length_logits, rtol=1e-4, atol=1e-5)
        lengths = mask.sum(dim=1) * 2
        canvas = model.lay_out(expected, lengths=lengths)
        bound, other = exported.model.bind(actual, canvas), model.model.bind(expected, canvas)
        inside = canvas.mask[:, :, None]
        state = torch.zeros_like(other.context.injection)
        for _ in range(3):
            value, other_value = bound(state), other(state)
            torch.testing.assert_close(value * inside, other_value * inside, rtol=1e-3, atol=1e-4)
            state = other_value * inside


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_figures_agree_with_torch(loaded, batch, kind):
    model, exported = loaded(kind, "fp32")
    for options in options_of(model):
        actual = exported.generate(**batch, **options, return_dict_in_generate=True)
        expected = model.generate(**batch, **options, return_dict_in_generate=True)
        assert torch.equal(actual.sequences, expected.sequences), options
        assert torch.equal(actual.nfe, expected.nfe), options
        torch.testing.assert_close(actual.sequences_scores, expected.sequences_scores, rtol=1e-3, atol=1e-4)
        if expected.residual is not None:
            assert torch.equal(actual.converged, expected.converged)
            torch.testing.assert_close(actual.residual, expected.residual, rtol=0.05, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_int8_agrees_on_most_tokens(loaded, batch, kind):
    model, exported = loaded(kind, "int8")
    near = agreement(lists(model.generate(**batch)), lists(exported.generate(**batch)))
    assert near.tokens > 0.7, near  # with random weights, probabilities of different tokens are similar


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_translation_does_not_depend_on_batch(loaded, batch, kind, precision):
    _, exported = loaded(kind, precision)

    def translate(rows: list[int], extra: int = 0, **options) -> list[tuple]:
        width = int(batch["attention_mask"][rows].sum(dim=1).max())
        pieces = {
            name: torch.nn.functional.pad(value[rows, :width], (0, extra), value=0) for name, value in batch.items()
        }
        pieces = {name: pieces[name] for name in ("input_ids", "attention_mask")}
        out = exported.generate(**pieces, **options, return_dict_in_generate=True)
        residual = [None] * len(rows) if out.residual is None else out.residual.tolist()
        return list(zip(lists(out.sequences), out.nfe.tolist(), residual, strict=True))

    for options in options_of(exported)[:2] + options_of(exported)[3:4]:
        single = [translate([row], **options)[0] for row in range(len(ENGLISH))]
        order = torch.randperm(len(ENGLISH)).tolist()
        for place, (text, nfe, residual) in enumerate(translate(order, extra=3, **options)):
            assert (text, nfe) == single[order[place]][:2]
            if residual is not None:
                # groups of one length have batches of other sizes, in which sums in fp32 are rounded differently
                assert residual == pytest.approx(single[order[place]][2], rel=1e-5 if precision == "int8" else 1e-2)


def test_converged_rows_are_not_evaluated(loaded, batch, monkeypatch):
    """The total number of rows of all calls of the graph equals the reported evaluations."""
    _, exported = loaded("implicit", "fp32")
    recorded = []
    graph = exported.model.transition.graph
    monkeypatch.setattr(
        exported.model.transition, "graph", lambda inputs: (recorded.append(len(inputs["state"])), graph(inputs))[1]
    )
    out = exported.generate(**batch, tol=3e-4, return_dict_in_generate=True)
    assert len(set(out.nfe.tolist())) > 1
    assert sum(recorded) == int(out.nfe.sum())


def test_log_probabilities_are_returned_only_if_needed(loaded, batch, monkeypatch):
    _, exported = loaded("implicit", "fp32")
    asked = []
    head = exported.head
    monkeypatch.setattr(exported, "head", lambda inputs, outputs: (asked.append(outputs), head(inputs, outputs))[1])
    exported.generate(**batch, stop_on_stable_tokens=2)
    assert {tuple(outputs) for outputs in asked} == {("tokens",)}
    exported.generate(**batch, stop_on_stable_tokens=2, return_dict_in_generate=True)
    assert {tuple(outputs) for outputs in asked} == {("tokens",), ("tokens", "scores")}
    exported.generate(**batch, ctc_beam_size=2)
    assert asked[-1] == ["tokens", "scores", "log_probabilities"]


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("kind", ["implicit", "explicit"])
def test_trajectory_and_streamer_work_with_exports(loaded, batch, tokenizer, capsys, kind, precision):
    _, exported = loaded(kind, precision)
    out = exported.generate(**batch, output_trajectory=True, return_dict_in_generate=True)
    for row, drafts in enumerate(out.trajectory):
        assert len(drafts) == out.nfe[row]
        assert drafts[-1].tokens.tolist() == lists(out.sequences)[row]
    one = {name: value[:1, : int(batch["attention_mask"][0].sum())] for name, value in batch.items()}
    exported.generate(**one, streamer=TerminalStreamer(tokenizer))
    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_translation_pipeline_accepts_exports(loaded, tokenizer, precision):
    model, exported = loaded("mixed", precision)
    translate = pipeline("translation", model=exported, tokenizer=tokenizer)
    single = [translate(sentence)[0] for sentence in ENGLISH]
    assert translate(ENGLISH, batch_size=4) == single
    if precision == "fp32":
        assert single == pipeline("translation", model=model, tokenizer=tokenizer)(ENGLISH)
    figures = translate("", return_figures=True)[0], translate(ENGLISH[0], return_figures=True)[0]
    assert figures[0] == {"translation_text": ""}
    assert figures[1]["nfe"] > 1
    settings = {"return_quality": True, "quality": make_quality(len(tokenizer))}
    (answer,) = translate(f"{ENGLISH[0]}  {ENGLISH[1]}", **settings)
    assert answer["translation_text"] == "  ".join(one["translation_text"] for one in single[:2])
    low, high = sorted(translate(sentence, **settings)[0]["quality"] for sentence in ENGLISH[:2])
    assert 0 < low <= answer["quality"] <= high < 1


def test_an_input_beyond_the_limits_is_refused(loaded, tokenizer):
    _, exported = loaded("implicit", "fp32")
    with pytest.raises(
        ValueError, match="A source of 65 tokens is longer than the 64 tokens that this export supports; split"
    ):
        exported.generate(torch.full((1, 65), 7))
    with pytest.raises(ValueError, match="The source is 129 positions long"):
        exported.generate(torch.full((1, 129), 7))
    assert exported.generate(torch.full((1, 64), 7)).shape[0] == 1
    assert exported.generate(torch.tensor([[7]])).shape[0] == 1


def test_options_that_do_not_fit_are_refused_as_in_torch(loaded, batch):
    _, exported = loaded("implicit", "fp32")
    with pytest.raises(ValueError, match="length_beams=2 needs config.length='predict'"):
        exported.generate(**batch, length_beams=2)
    with pytest.raises(ValueError, match="penalty_alpha"):
        exported.generate(**batch, penalty_alpha=0.5)
    with pytest.raises(ValueError, match="input_sampling=True needs an input predictor"):
        exported.generate(**batch, input_sampling=True)


def test_another_device_is_refused(loaded):
    _, exported = loaded("implicit", "fp32")
    assert exported.to("cpu") is exported
    with pytest.raises(ValueError, match="runs on the CPU, not on cuda"):
        exported.to("cuda:0")


def test_missing_or_old_onnxruntime_is_reported_with_its_extra(exported, monkeypatch):
    _, folders = exported("implicit")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r"needs onnxruntime: pip install 'hf_deqnar\[onnx\]'"):
        DeqNarOnnxModel.from_pretrained(folders["fp32"])
    monkeypatch.setitem(sys.modules, "onnxruntime", types.SimpleNamespace(__version__="1.9.0"))
    with pytest.raises(ImportError, match=r"onnxruntime 1.9.0 is too old.*pip install --upgrade 'hf_deqnar\[onnx\]'"):
        DeqNarOnnxModel.from_pretrained(folders["fp32"])


def test_damaged_and_mismatched_folders_are_refused(exported, tmp_path):
    _, folders = exported("implicit")
    _, others = exported("mixed")
    mixed_up = tmp_path / "mixed_up"
    shutil.copytree(folders["fp32"], mixed_up)
    shutil.copy(others["fp32"] / "config.json", mixed_up)
    with pytest.raises(ValueError, match="config.json differs from the exported file: it is damaged or of another"):
        DeqNarOnnxModel.from_pretrained(mixed_up)
    cut = tmp_path / "cut"
    shutil.copytree(folders["int8"], cut)
    (cut / "head.onnx").write_bytes((cut / "head.onnx").read_bytes()[:1000])
    with pytest.raises(ValueError, match="head.onnx differs from the exported file"):
        DeqNarOnnxModel.from_pretrained(cut)
    with pytest.raises(ValueError, match="onnxruntime .* cannot load .*head.onnx"):
        runtime.Session(cut / "head.onnx", threads=1).session  # noqa: B018, reading the property loads it
    with pytest.raises(FileNotFoundError, match="is not an ONNX export.*name .*fp32 or .*int8"):
        DeqNarOnnxModel.from_pretrained(folders["fp32"].parent)
    with pytest.raises(ValueError, match="threads must be at least 1, not 0"):
        DeqNarOnnxModel.from_pretrained(folders["fp32"], threads=0)
