"""Training in several processes with the files of `examples/accelerate`, and on two machines."""

import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.utils import DistributedType
from safetensors.torch import load_file

from ..conftest import PAIRS_FILE

ROOT = Path(__file__).parents[2]
FILES = ROOT / "examples" / "accelerate"
SIZES = ["encoder_layers=1", "d_model=32", "encoder_ffn_dim=32", "decoder_ffn_dim=32", "max_nfe=4", "dropout=0"]
ROUNDING = 1e-4  # of a weight after a few updates; another batch changes a weight by as much as Adam's step, 1e-3
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def flags(folder: Path, *, steps: int = 4, objective: str = "ctc", output: str = "run") -> list[str]:
    """A run of a few updates, evaluated and saved after every second one."""
    text = f"""
        --train_data {PAIRS_FILE} --validation_data {PAIRS_FILE} --source en --target de --validation_limit 4
        --vocab_size 400 --preset tiny --objective {objective} --max_tokens 400 --learning_rate 1e-3 --warmup_steps 1
        --max_steps {steps} --eval_strategy steps --eval_steps 2 --save_steps 2 --logging_steps 1 --average_best 0
        --disable_tqdm true --report_to none --cache_dir {folder / "cache"} --output_dir {folder / output}
        --config length=ctc refinement=implicit
    """
    return [*text.split(), *SIZES]


def launch(file: str, processes: int, arguments: list[str], script: str = "scripts/train.py") -> str:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(FILES / file)]
    command += ["--num_processes", str(processes), "--main_process_port", "0", script, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def train_alone(arguments: list[str]) -> None:
    command = [sys.executable, "scripts/train.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def distance(first: Path, second: Path) -> float:
    """Largest difference of two saved models."""
    weights, others = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert weights.keys() == others.keys()
    return max((weights[name] - others[name]).abs().max().item() for name in weights)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run of one process: its folder."""
    folder = tmp_path_factory.mktemp("alone")
    train_alone(flags(folder))
    return folder / "run"


@pytest.mark.parametrize("file", sorted(path.name for path in FILES.glob("*.yaml")))
def test_accelerate_reads_the_file_without_a_default(file):
    config = load_config_from_file(str(FILES / file))
    assert isinstance(config, ClusterConfig)
    kinds = {"ddp": DistributedType.MULTI_GPU, "fsdp2": DistributedType.FSDP, "deepspeed": DistributedType.DEEPSPEED}
    assert config.distributed_type == next(kind for name, kind in kinds.items() if file.startswith(name))
    assert config.num_processes == (8 if "nodes" in file else 2)
    assert config.num_machines == (2 if "nodes" in file else 1)
    if file.startswith("deepspeed"):
        assert config.deepspeed_config["zero_stage"] == int(re.search(r"zero(\d)", file)[1])


def test_the_readme_names_every_file():
    readme = (FILES / "README.md").read_text()
    assert set(re.findall(r"^\| `(\w+\.yaml)`", readme, re.MULTILINE)) == {path.name for path in FILES.glob("*.yaml")}


@pytest.mark.parametrize(
    "processes", [pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.distributed)]
)
def test_ddp_takes_the_steps_of_one_process(tmp_path, alone, processes):
    launch("ddp.yaml", processes, flags(tmp_path))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["processes"] == processes
    assert distance(tmp_path / "run", alone) < ROUNDING


@pytest.mark.distributed
def test_fsdp2_takes_the_steps_of_one_process_and_saves_whole_weights(tmp_path, alone):
    """Sharded on CPUs, where accelerate would use DDP."""
    script = "tests/training/train_sharded_on_cpu.py"
    launch("fsdp2.yaml", 2, flags(tmp_path), script)
    run = tmp_path / "run"
    assert (run / "checkpoint-4" / "pytorch_model_fsdp_0").is_dir()  # of FSDP
    assert distance(run, alone) < ROUNDING
    assert json.loads((run / "config.json").read_text())["architectures"] == ["DeqNarForConditionalGeneration"]
    assert (run / "modeling_deqnar.py").is_file()
    assert not list(run.glob("_fsdp*"))


@pytest.mark.distributed
def test_fsdp2_resumes_and_averages_the_best_weights(tmp_path, alone):
    script, run = "tests/training/train_sharded_on_cpu.py", tmp_path / "run"
    launch("fsdp2.yaml", 2, flags(tmp_path), script)
    for path in (run / "checkpoint-4", run / "model.safetensors", run / "config.json"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    settings = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**settings, "finished": False}))
    assert "checkpoint-2" in launch("fsdp2.yaml", 2, flags(tmp_path), script)
    assert distance(run, alone) < ROUNDING
    for folder, start in (("averaged", lambda *given: launch("fsdp2.yaml", 2, *given, script)), ("one", train_alone)):
        averaged = flags(tmp_path, output=folder)
        averaged[averaged.index("--average_best") + 1] = "2"
        start(averaged)
        assert len(list((tmp_path / folder / "best").glob("*.safetensors"))) == 2
    assert distance(tmp_path / "averaged", tmp_path / "one") < ROUNDING


@pytest.mark.distributed
@pytest.mark.skipif(torch.accelerator.is_available(), reason="FSDP would be used")
def test_a_configuration_that_would_be_ignored_is_refused(tmp_path):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(FILES / "fsdp2.yaml")]
    command += ["--main_process_port", "0", "scripts/train.py", *flags(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    assert "asks for FSDP, which it ignores on cpu" in done.stderr


@pytest.mark.distributed
def test_a_run_resumes_with_other_numbers_of_processes(tmp_path):
    """Two processes, then one, then three: the weights of an uninterrupted run of two, but for rounding."""
    launch("ddp.yaml", 2, flags(tmp_path, steps=6, output="whole"))
    arguments = flags(tmp_path, steps=6)
    for processes, last in ((2, 2), (1, 4)):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        script = tmp_path / "stopping.py"
        script.write_text(STOPPING)
        done = subprocess.run(
            [*command, str(script), str(last), *arguments],
            cwd=ROOT,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode != 0
        assert f"stopped after {last}" in done.stderr, done.stderr[-3000:]
        assert (tmp_path / "run" / f"checkpoint-{last}").is_dir()
        assert not (tmp_path / "run" / "model.safetensors").exists()
    assert "started with 2 processes and resumes with 3" in launch("ddp.yaml", 3, arguments)
    assert distance(tmp_path / "run", tmp_path / "whole") < ROUNDING


# `scripts/train.py` that fails at the beginning of the update after the one that is given.
STOPPING = """
import sys
from transformers import TrainerCallback
from hf_deqnar.training import base_trainer
from hf_deqnar.training.run import main

last = int(sys.argv.pop(1))

class Stop(TrainerCallback):
    def on_step_begin(self, args, state, control, **rest):
        if state.global_step == last:
            raise KeyboardInterrupt(f"stopped after {last}")

create = base_trainer.TranslationTrainer.__init__

def create_stopping(self, *arguments, **options):
    create(self, *arguments, **options)
    self.add_callback(Stop())

base_trainer.TranslationTrainer.__init__ = create_stopping
main(sys.argv[1:])
"""


@pytest.mark.distributed
@pytest.mark.parametrize(
    "options",
    [
        ["--gradient_accumulation_steps", "2"],
        ["--bf16", "true"],
        ["--gradient_checkpointing", "true"],
        ["--torch_compile", "true", "--torch_compile_backend", "aot_eager"],
    ],
    ids=lambda options: options[0].strip("-"),
)
def test_an_option_has_the_same_effect_in_two_processes(tmp_path, options):
    """bfloat16 rounds differently in other batches, so that its weights agree less."""
    launch("ddp.yaml", 2, [*flags(tmp_path, output="two"), *options])
    train_alone([*flags(tmp_path, output="one"), *options])
    assert distance(tmp_path / "one", tmp_path / "two") < (5e-3 if "--bf16" in options else ROUNDING)
    logged = [json.loads((tmp_path / name / "trainer_state.json").read_text()) for name in ("one", "two")]
    losses = [[entry["nat"] for entry in log["log_history"] if "nat" in entry] for log in logged]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2 if "--bf16" in options else 1e-4)


def run_ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def two_machines():
    """Two network namespaces that are connected by a cable: their names; addresses 10.213.0.1 and 10.213.0.2."""
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    mark = uuid.uuid4().hex[:6]
    names = [f"node{number}-{mark}" for number in (0, 1)]
    try:
        for name in names:
            run_ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this kernel refuses network namespaces: {error.stderr.decode().strip()}")
    try:
        cable = [f"v{number}{mark}" for number in (0, 1)]
        run_ip("link", "add", cable[0], "netns", names[0], "type", "veth", "peer", "name", cable[1], "netns", names[1])
        for number, (name, end) in enumerate(zip(names, cable, strict=True), start=1):
            run_ip("-n", name, "address", "add", f"10.213.0.{number}/24", "dev", end)
            run_ip("-n", name, "link", "set", end, "up")
            run_ip("-n", name, "link", "set", "lo", "up")
        yield dict(zip(names, cable, strict=True))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.mark.distributed
def test_two_machines_train_like_one(tmp_path, alone, two_machines):
    """torchrun on each of two machines, which reach each other over their network only."""
    started = []
    for rank, (name, cable) in enumerate(two_machines.items()):
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        command += [f"--node_rank={rank}", "--nproc_per_node=1", "--master_addr=10.213.0.1", "--master_port=29511"]
        log = (tmp_path / f"{rank}.log").open("wb")
        started.append(
            subprocess.Popen(
                [*command, "scripts/train.py", *flags(tmp_path)],
                cwd=ROOT,
                env={**ENVIRONMENT, "GLOO_SOCKET_IFNAME": cable},
                stdout=log,
                stderr=log,
            )
        )
    try:
        for rank, process in enumerate(started):
            assert process.wait(300) == 0, (tmp_path / f"{rank}.log").read_text()[-3000:]
    finally:
        for process in started:
            process.kill()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["processes"] == 2
    assert distance(tmp_path / "run", alone) < ROUNDING
