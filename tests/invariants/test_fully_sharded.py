"""A model sharded by `fully_shard` trains and translates like an unsharded one. Real gloo processes, in float64."""

import json
import os
import subprocess
import sys

SCRIPT = """
import json
import sys
import torch
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from hf_deqnar import DeqNarConfig, DeqNarForConditionalGeneration
from hf_deqnar.objectives.objective import combine, parse_objective

accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == 2
figures = []
for length, refinement, name in (("ctc", "implicit", "ctc"), ("predict", "mixed", "glat")):
    config = DeqNarConfig.preset(
        "tiny", vocab_size=60, length=length, refinement=refinement, dropout=0.0, encoder_layers=2, d_model=32,
        encoder_ffn_dim=64, decoder_ffn_dim=64, decoder_layers=2, tol=1e-9, max_nfe=8,
    )
    torch.manual_seed(0)
    whole = DeqNarForConditionalGeneration(config).double()
    sharded = DeqNarForConditionalGeneration(config).double()
    sharded.load_state_dict(whole.state_dict())
    mesh = init_device_mesh("cpu", (2,))
    for module in sharded.modules():
        if type(module).__name__ in sharded._no_split_modules:
            fully_shard(module, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    batch = {"input_ids": torch.randint(6, 60, (4, 5)), "labels": torch.randint(6, 60, (4, 4))}
    objective = parse_objective(name)
    losses = []
    for model in (whole, sharded):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            generator = torch.Generator().manual_seed(1)
            loss = combine(model(objective=lambda inner: objective.terms(inner, batch, 0.0, generator)))["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert all(isinstance(weight, DTensor) for weight in sharded.parameters())
    full = {key: value.full_tensor() for key, value in sharded.state_dict().items() if isinstance(value, DTensor)}
    distance = max((full[key] - value).abs().max().item() for key, value in whole.state_dict().items() if key in full)
    texts = [model.eval().generate(batch["input_ids"]).tolist() for model in (whole, sharded)]
    assert all(isinstance(weight, DTensor) for weight in sharded.parameters())
    figures.append({"losses": losses, "distance": distance, "compared": len(full), "same_texts": texts[0] == texts[1]})
if accelerator.is_main_process:
    print(json.dumps(figures))
"""


def test_sharded_model_trains_and_translates_like_an_unsharded_one(tmp_path):
    script = tmp_path / "sharded.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for figures in json.loads(done.stdout.splitlines()[-1]):
        assert abs(figures["losses"][0] - figures["losses"][1]) < 1e-10
        assert figures["compared"] > 10
        assert figures["distance"] < 1e-10
        assert figures["same_texts"]
