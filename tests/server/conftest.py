"""Servers on the loopback interface: in a thread of the tests, with any limits."""

import socket
import threading
from contextlib import contextmanager

import httpx
import pytest
import uvicorn

from hf_deqnar.cli.loading import load_model
from hf_deqnar.documents.translator import Translator
from hf_deqnar.server.application import ServerOptions, create_application


@pytest.fixture(scope="session")
def translator(saved):
    return Translator(*load_model(str(saved["ctc"])), batch_size=16)


@contextmanager
def running(translator, **options):
    """The URL of a server, which is ended when the block ends."""
    application = create_application(translator, ServerOptions(source="en", target="de", **options), "test")
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(512)
    server = uvicorn.Server(uvicorn.Config(application, log_level="warning", timeout_graceful_shutdown=30))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=60)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def url(translator):
    with running(translator) as url:
        yield url


@pytest.fixture
def post(url):
    """Send a translation request with fields of JSON."""

    def post(path="/translate", **fields):
        return httpx.post(url + path, json={"source": "en", "target": "de", **fields}, timeout=60)

    return post
