"""Dynamic KD from file to training step: candidates, batches, choice and step."""

import json

import pytest
import torch
from torch.nn import functional

from hf_deqnar.distillation.candidates import pairwise_bleu
from hf_deqnar.training.arguments import DataArguments, DeqNarTrainingArguments
from hf_deqnar.training.run import gamma_for, read_training_data, tokenize
from hf_deqnar.training.trainer import DeqNarTrainer

from ..conftest import SENTENCES, small_model
from .conftest import length_for

GAMMA = [1.0, 0.8, 1.1]


def candidates_of(target: str) -> list[str]:
    words = target.split()
    return [" ".join(reversed(words)), " ".join(words[:-1] or ["kurz"]), target]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "candidates.jsonl"
    rows = [{"en": source, "de": target, "candidates": candidates_of(target)} for source, target in SENTENCES * 2]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def own_loss(model, source: torch.Tensor, target: list[int]) -> float:
    """−log P(T | X) per token, by a forward pass over one sentence."""
    labels = torch.tensor([target])
    with torch.no_grad():
        out = model(input_ids=source[None], labels=labels)
    if model.config.length == "ctc":
        return float(out.loss)
    return float(functional.cross_entropy(out.logits[0], labels[0]))  # the model's loss also has that of the length


@pytest.mark.parametrize(("objective", "beta"), [("dynamic_kd+ctc+glat", 0.0005), ("dynamic_kd+glat", 0.002)])
def test_choice_agrees_with_the_rule_of_the_paper(tokenizer, tmp_path, file, objective, beta):
    arguments = DeqNarTrainingArguments(
        str(tmp_path / "run"), objective=objective, gamma=GAMMA, beta=beta, max_tokens=100, use_cpu=True, max_steps=2
    )
    data = DataArguments(str(file), "en", "de", max_length=60, cache_dir=str(tmp_path / "cache"))
    model = small_model(length=length_for(objective), vocab_size=len(tokenizer))
    pairs, candidates = read_training_data(data, arguments)
    tokenized = tokenize(pairs, tokenizer, model.config, data, candidates)
    trainer = DeqNarTrainer(model, arguments, train_dataset=tokenized.dataset, processing_class=tokenizer)
    choices = []  # of the rule, of the loss alone, of the distortion alone
    for batch in trainer.get_train_dataloader():
        source_mask = batch["attention_mask"].bool()
        rows, _, longest = batch["candidates"].shape
        assert rows * longest <= 100
        source = model.prepare(batch["input_ids"], source_mask)
        found = trainer.objective._choose_candidate(model, batch, source)
        for number, source, labels in zip(batch["number"].tolist(), batch["input_ids"], found, strict=True):
            target = SENTENCES[number % 6][1]
            texts = candidates_of(target)
            near = pairwise_bleu(texts)
            distortions = [-beta * sum(GAMMA[i] * near[i][j] for i in range(3)) for j in range(3)]
            losses = [own_loss(model, source[source != 1], tokenizer(text)["input_ids"]) for text in texts]
            sums = [loss + distortion for loss, distortion in zip(losses, distortions, strict=True)]
            choices.append([scores.index(min(scores)) for scores in (sums, losses, distortions)])
            assert labels[labels >= 0].tolist() == tokenizer(texts[choices[-1][0]])["input_ids"]
    by_rule, by_loss, by_distortion = zip(*choices, strict=True)
    assert by_rule not in (by_loss, by_distortion)
    trainer.train()
    assert trainer.state.global_step == 2


def test_gamma_is_the_given_one_that_of_the_paper_or_ones():
    assert gamma_for(5) == [0.7, 0.6, 1.3, 1.5, 2.3]
    assert gamma_for(3) == [1.0, 1.0, 1.0]
    assert gamma_for(2, [0.1, 0.2]) == [0.1, 0.2]
    with pytest.raises(ValueError, match="gamma has 3 weights but the data 2 candidates per sentence; give 2"):
        gamma_for(2, [1.0, 1.0, 1.0])


def test_validation_needs_no_candidates(make_trainer):
    def with_candidates(dataset):
        pairs = [[labels, labels] for labels in dataset["labels"]]
        return dataset.add_column("candidates", pairs).add_column("similarity", [[[100.0] * 2] * 2] * len(pairs))

    trainer = make_trainer(objective="dynamic_kd+ctc", prepare=with_candidates, gamma=[1.0, 1.0])
    trainer.eval_dataset = trainer.eval_dataset.remove_columns(["candidates", "similarity"])
    trainer.train()
    assert trainer.evaluate()["eval_nat"] > 0
