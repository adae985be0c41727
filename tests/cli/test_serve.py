"""`hf-deqnar serve` in a process of its own."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest
import uvicorn


@pytest.fixture
def start(saved):
    """Start a server; gives the process and its URL."""
    processes = []

    def start(*flags):
        command = [sys.executable, "-m", "hf_deqnar.cli.main", "serve", "--model", str(saved["ctc"]), "--port", "0"]
        command += ["--source", "en", "--target", "de", *map(str, flags)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        return process, re.fullmatch(r"Listening on (\S+)\n", process.stdout.readline())[1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_accepted_requests_are_answered_after_sigterm(start, tmp_path):
    (tmp_path / "keys").write_text("secret\n")
    process, url = start("--api_keys", tmp_path / "keys", "--threads", 1)
    texts = [f"{number} dogs are playing in the snow." for number in range(40)]
    answers = []

    def ask():
        body = {"q": texts, "source": "en", "target": "de", "api_key": "secret"}
        answers.append(httpx.post(f"{url}/translate", json=body, timeout=60))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    while "hf_deqnar_active_requests 4.0" not in httpx.get(f"{url}/metrics").text:
        assert process.poll() is None
    os.kill(process.pid, signal.SIGTERM)
    for thread in threads:
        thread.join(timeout=60)
    assert [answer.status_code for answer in answers] == [200] * 4
    assert all(len(answer.json()["translatedText"]) == 40 for answer in answers)
    assert process.wait(timeout=30) == 0
    assert process.stderr.read() == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_between_the_address_and_the_first_request_ends_the_server(run, saved, monkeypatch, number):
    """Such a signal was lost before."""
    serve, late, before = uvicorn.Server.run, [], {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}

    def run_after_signal(server, sockets):
        def give_up():
            late.append(1)
            server.should_exit = True

        timer = threading.Timer(20, give_up)
        timer.start()
        os.kill(os.getpid(), number)
        serve(server, sockets=sockets)
        timer.cancel()

    monkeypatch.setattr(uvicorn.Server, "run", run_after_signal)
    try:
        done = run("serve", "--model", saved["ctc"], "--source", "en", "--target", "de", "--port", 0)
    finally:
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)
    assert done.returncode == 0
    assert not late


def test_wrong_settings_are_one_readable_line(run, saved, tmp_path):
    (tmp_path / "empty").write_text("\n")
    model = ["--model", saved["ctc"], "--source", "en", "--target", "de"]
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        for arguments, message in [
            ([*model, "--port", taken], f"Port {taken} of 127.0.0.1 cannot be used (Address already in use)"),
            ([*model, "--port", 70000], "--port must be from 0 to 65535"),
            ([*model, "--batch_size", 0], "--batch_size must be at least 1"),
            ([*model, "--api_keys", tmp_path / "empty"], "contains no key"),
            ([*model, "--glossary", tmp_path / "absent"], "absent"),
            (["--model", saved["ctc"]], "Name the languages of the model"),
            (["--model", tmp_path / "absent", "--source", "en", "--target", "de", "--port", "0"], "neither a model"),
        ]:
            done = run("serve", *arguments)
            assert done.returncode == 2
            assert message in done.stderr
            assert len(done.stderr.splitlines()) == 1


def test_a_missing_extra_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done = run("serve")
    assert done.returncode == 2
    assert "pip install 'hf_deqnar[serve]'" in done.stderr
