"""Distillation with input and output on S3: the server of moto, in a process of its own."""

import gzip
import json
import socket
import subprocess
import sys
import time

import pytest

from hf_deqnar.cli.main import main
from hf_deqnar.data.parallel_text import read_parallel
from hf_deqnar.utils.storage import Store

from ..conftest import SENTENCES
from .conftest import make_teacher

s3fs = pytest.importorskip("s3fs", reason="s3fs is the s3 extra")


@pytest.fixture(scope="module")
def server():
    """The address of a server that is empty and accepts any credentials."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


@pytest.fixture
def bucket(server, monkeypatch):
    """The address of a bucket that contains a corpus."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    system = s3fs.S3FileSystem()
    if not system.exists("corpora"):
        system.mkdir("corpora")
    rows = [
        json.dumps({"en": f"{english} {number}", "de": german}) for number in range(4) for english, german in SENTENCES
    ]
    for part in range(2):
        content = "".join(f"{row}\n" for row in rows[part::2])
        system.pipe_file(f"corpora/train-{part}.jsonl.gz", gzip.compress(content.encode()))
    yield "s3://corpora"
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def command(tokenizer, tmp_path, bucket):
    """Distillation of the corpus in the bucket, in five shards."""
    teacher = make_teacher(tokenizer)
    teacher.model.save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    data = ["--data", f"{bucket}/train-*.jsonl.gz", "--source", "en", "--target", "de"]
    options = ["--num_beams", "2", "--max_length", "20", "--shard_sentences", "5"]
    return ["distill", "--teacher", str(tmp_path / "teacher"), *data, *options]


def test_shares_on_s3_are_the_file_of_one_machine(command, bucket, tmp_path, capsys):
    assert main([*command, "--output", str(tmp_path / "alone.jsonl.gz")]) == 0
    output = f"{bucket}/distilled.jsonl.gz"
    for share in ("0/3", "2/3"):
        assert main([*command, "--output", output, "--shard", share]) == 0
    assert Store(output).read() is None
    assert Store(f"{output}.shards").names() == [*(f"0000{n}.jsonl" for n in (0, 2, 3)), "manifest.json"]
    assert main([*command, "--output", output]) == 0  # the shards of the share that did not run
    assert f"written to {output}" in capsys.readouterr().out
    assert Store(output).read() == (tmp_path / "alone.jsonl.gz").read_bytes()


def test_parts_on_s3_are_read_for_training(command, bucket):
    output = f"{bucket}/parts/"
    assert main([*command, "--output", output, "--part_format", "parquet", "--part_sentences", "10"]) == 0
    sources = [pair.source for pair in read_parallel(f"{bucket}/train-*.jsonl.gz", "en", "de")]
    assert [pair.source for pair in read_parallel(f"{output}*.parquet", "en", "de")] == sources
    assert Store(output).names() == [f"part-0000{number}-of-00003.parquet" for number in range(3)]


def test_what_is_wrong_with_an_address_is_one_line(command, bucket, capsys, monkeypatch):
    def error(*flags) -> str:
        assert main([*command, *flags]) == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hf-deqnar")]
        assert len(lines) == 1
        return lines[0]

    assert "There is no s3://corpora/none.jsonl" in error(
        "--data", "s3://corpora/none.jsonl", "--output", "s3://c/o.jsonl"
    )
    assert "s3://nobucket/o.jsonl.shards" in error("--output", "s3://nobucket/o.jsonl")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    assert "s3://corpora/train-" in error("--output", "s3://corpora/o.jsonl")
