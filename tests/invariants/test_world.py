"""Invariant 10: two processes with half the batch each take the step of one process. Gloo processes, in float64."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

SCRIPT = """
import sys
import torch
from hf_deqnar import DeqNarConfig, DeqNarForConditionalGeneration
from hf_deqnar.data.parallel_text import Pair
from hf_deqnar.data.tokenized_dataset import tokenize_for_validation, tokenize_pairs
from hf_deqnar.data.tokenizer import train_tokenizer
from hf_deqnar.training.arguments import DeqNarTrainingArguments
from hf_deqnar.training.trainer import DeqNarTrainer

texts = ["A man is riding a horse.", "Two dogs play in the snow.", "A horse.", "She reads a long book in the garden."]
pairs = [Pair(text, [text.replace("a", "e")]) for text in texts * 5]
tokenizer = train_tokenizer([text for pair in pairs for text in (pair.source, *pair.references)], vocab_size=300)
for case in sys.argv[2:]:
    length, refinement, objective, optimizer, *predictor = case.split(",")
    output = f"{sys.argv[1]}/{case}"
    torch.manual_seed(0)
    config = DeqNarConfig.preset(
        "tiny", vocab_size=len(tokenizer), length=length, refinement=refinement, dropout=0.0, encoder_layers=1,
        d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64, decoder_layers=2, tol=1e-9, max_nfe=8,
        input_predictor=bool(predictor),
    )
    arguments = DeqNarTrainingArguments(
        output, objective=objective, max_steps=4, max_tokens=120, learning_rate=1e-3, warmup_steps=1, use_cpu=True,
        report_to="none", save_strategy="no", eval_strategy="steps", eval_steps=2, average_best=0,
        initial=0.0 if refinement == "stacked" else 0.2,
        logging_steps=1, disable_tqdm=True, optimizer=None if optimizer == "adam" else optimizer,
    )
    trainer = DeqNarTrainer(
        DeqNarForConditionalGeneration(config).double(), arguments,
        train_dataset=tokenize_pairs(pairs, tokenizer, max_length=60, cache=output + "/cache").dataset,
        eval_dataset=tokenize_for_validation(pairs[:7], tokenizer, max_length=60), processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    if arguments.process_index == 0:
        trainer.state.save_to_json(output + "/state.json")
"""


def run(folder: Path, processes: int, *arguments: str) -> Path:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    output = folder / f"{processes}"
    output.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    done = subprocess.run(
        [*command, str(script), str(output), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return output


CASES = ["ctc,implicit,ctc,muon", "predict,mixed,axe,adam", "predict,stacked,ce,adam"]
CASES += ["dag,implicit,dag,adam"]
CASES += ["predict,implicit,ce,adam,predictor"]  # which is not trained


def test_two_processes_take_the_steps_of_one(tmp_path):
    outputs = [run(tmp_path, processes, *CASES) for processes in (1, 2)]
    for case in CASES:
        one, two = (output / case for output in outputs)
        first, second = (load_file(folder / "model.safetensors") for folder in (one, two))
        for name in first:
            assert (first[name] - second[name]).abs().max() < 1e-9, (case, name)
        logs = [json.loads((folder / "state.json").read_text())["log_history"] for folder in (one, two)]
        names = {"loss", "nat", "nfe", "residual", "length", "initial", "eval_nat", "eval_bleu", "grad_norm"}
        for actual, expected in zip(*logs, strict=True):
            for name in names & actual.keys():
                assert actual[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-9), (case, name)
