"""The server, used by real clients over the loopback interface."""

import asyncio
import json
import socket
import time

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from prometheus_client.parser import text_string_to_metric_families
from schemathesis import GenerationMode

from hf_deqnar.cli.loading import load_model
from hf_deqnar.documents.glossary import Glossary
from hf_deqnar.documents.marks import MARK
from hf_deqnar.documents.plain_text import parse_text
from hf_deqnar.documents.translation import Request, translate_document
from hf_deqnar.documents.translator import Translator
from hf_deqnar.models.deqnar.pipeline_deqnar import DeqNarTranslationPipeline

from ..conftest import SENTENCES, real_sentences
from ..teachers import small_teacher
from .conftest import running

ENGLISH = [english for english, _ in SENTENCES]


def metrics_of(url: str) -> dict[str, float]:
    """Metrics without labels, by name."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.05)


def test_a_text_gives_a_text_and_a_list_a_list(post, translator):
    expected = translator([Request(text) for text in ENGLISH])
    assert post(q=ENGLISH[0]).json() == {"translatedText": expected[0]}
    assert post(q=ENGLISH).json() == {"translatedText": expected}
    assert post(q=[]).json() == {"translatedText": []}
    assert post(q=["", " \n"]).json() == {"translatedText": ["", " \n"]}


def test_sentences_of_a_text_are_translated_one_by_one(post, translator):
    expected = translator([Request(text) for text in ENGLISH[:3]])
    text = f"{ENGLISH[0]} {ENGLISH[1]}\n\n{ENGLISH[2]}\n"
    assert post(q=text).json()["translatedText"] == f"{expected[0]} {expected[1]}\n\n{expected[2]}\n"


def test_markup_of_html_is_kept(post, translator):
    (expected,) = translator([Request(ENGLISH[0])])
    answer = post(q=f"<p class='a'>{ENGLISH[0]}</p><hr>", format="html").json()["translatedText"]
    assert answer.startswith("<p class='a'>")
    assert answer.endswith("</p><hr>")
    assert expected.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in answer


def test_form_fields_are_accepted_as_by_libretranslate(url, post):
    fields = {"q": ENGLISH[:2], "source": "auto", "target": "de"}
    answer = httpx.post(f"{url}/translate", data=fields)
    assert answer.json() == post(q=ENGLISH[:2]).json()
    assert httpx.post(f"{url}/translate", data={**fields, "q": ENGLISH[0]}).json() == post(q=ENGLISH[0]).json()


def test_two_hundred_concurrent_requests_get_their_own_translations(translator):
    """The answers are those of each text alone, and texts that arrived together were translated together."""
    texts = [f"{number} {text[:40].strip()}" for number, text in enumerate(real_sentences(50) * 4)]
    expected = [translate_document(parse_text(text), translator) for text in texts]

    async def ask_all(url):
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            requests = [{"q": text, "source": "en", "target": "de"} for text in texts]
            return await asyncio.gather(*(client.post(f"{url}/translate", json=request) for request in requests))

    with running(translator) as url:
        answers = asyncio.run(ask_all(url))
        metrics = metrics_of(url)
    assert [answer.status_code for answer in answers] == [200] * 200
    assert [answer.json()["translatedText"] for answer in answers] == expected
    assert metrics["hf_deqnar_batch_size_sum"] >= 200
    assert metrics["hf_deqnar_batch_size_count"] < metrics["hf_deqnar_batch_size_sum"] / 2
    assert metrics["hf_deqnar_active_requests"] == metrics["hf_deqnar_waiting_texts"] == 0


def ask(url: str, **fields) -> httpx.Response:
    return httpx.post(f"{url}/translate", json={"source": "en", "target": "de", **fields}, timeout=60)


@pytest.fixture(scope="module")
def several(translator):
    """The translations of a text, the best first."""
    pipeline = DeqNarTranslationPipeline(model=translator.model, tokenizer=translator.tokenizer, task="translation")

    def several(text: str, count: int) -> list[str]:
        return [one["translation_text"] for one in pipeline(text, num_return_sequences=count, num_beams=count)]

    return several


def test_alternatives_are_the_next_translations_of_the_search(post, several):
    best, *others = several(ENGLISH[0], 4)
    assert len(others) > 1
    assert post(q=ENGLISH[0], alternatives=3).json() == {"translatedText": best, "alternatives": others}
    assert post(q=ENGLISH[0], alternatives=0).json() == post(q=ENGLISH[0]).json()
    assert "alternatives" not in post(q=ENGLISH[0]).json()
    answer = post(q=[ENGLISH[1], "", ENGLISH[0]], alternatives=3).json()
    assert answer["translatedText"] == [several(ENGLISH[1], 4)[0], "", best]
    assert answer["alternatives"] == [several(ENGLISH[1], 4)[1:], [], others]
    assert post(q=[], alternatives=3).json() == {"translatedText": [], "alternatives": []}


def test_an_alternative_of_a_text_has_that_alternative_of_each_sentence(post, several):
    first, second = several(ENGLISH[0], 3), several(ENGLISH[2], 3)
    assert len(first) != len(second)  # the last alternative of the one is used again
    answer = post(q=f"{ENGLISH[0]} 42.\n\n{ENGLISH[2]}", alternatives=2).json()
    assert [answer["translatedText"], *answer["alternatives"]] == [
        f"{first[min(rank, len(first) - 1)]} 42.\n\n{second[min(rank, len(second) - 1)]}"
        for rank in range(max(len(first), len(second)))
    ]


def test_requests_with_other_numbers_of_alternatives_do_not_change_each_other(translator, several):
    texts = real_sentences(24)
    numbers = [index % 4 for index in range(24)]
    expected = [several(text, number + 1) for text, number in zip(texts, numbers, strict=True)]

    async def ask_all(url):
        async with httpx.AsyncClient(timeout=120) as client:
            fields = {"source": "en", "target": "de"}
            requests = [{"q": q, "alternatives": one, **fields} for q, one in zip(texts, numbers, strict=True)]
            return await asyncio.gather(*(client.post(f"{url}/translate", json=request) for request in requests))

    with running(translator, batch_delay=0.1) as url:
        answers = [answer.json() for answer in asyncio.run(ask_all(url))]
        metrics = metrics_of(url)
    assert [[one["translatedText"], *one.get("alternatives", [])] for one in answers] == expected
    assert metrics["hf_deqnar_batch_size_count"] < 24


@pytest.mark.parametrize("alternatives", [11, -1, "3", True, 1.5, None, [1]])
def test_a_wrong_number_of_alternatives_is_refused(post, alternatives):
    answer = post(q="Hi.", alternatives=alternatives)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("alternatives: Input should be")


def test_alternatives_of_a_form_are_accepted_as_by_libretranslate(url, post):
    form = {"q": ENGLISH[0], "source": "en", "target": "de"}
    answer = httpx.post(f"{url}/translate", data={**form, "alternatives": "2"})
    assert answer.json() == post(q=ENGLISH[0], alternatives=2).json()
    for wrong in ("two", "-1", "11", "9" * 5000):
        assert httpx.post(f"{url}/translate", data={**form, "alternatives": wrong}).status_code == 400


def test_models_that_predict_lengths_and_others_have_alternatives(saved, tokenizer):
    teacher = small_teacher(vocabulary=len(tokenizer))
    for model in (load_model(str(saved["predict"]))[0], teacher):
        with running(Translator(model, tokenizer)) as url:
            answer = ask(url, q=ENGLISH[0], alternatives=3).json()
        texts = [answer["translatedText"], *answer["alternatives"]]
        assert 1 < len(set(texts)) == len(texts) <= 4


def send_and_close(url: str, path: str, fields: dict, read: bytes = b"") -> None:
    """A client that closes its connection before the response, or in the middle of it."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"source": "en", "target": "de", **fields}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        received = b""
        while read not in received:
            received += connection.recv(4096)


def test_texts_of_a_client_that_left_are_dropped_and_others_are_served(translator, post):
    with running(translator) as url:
        send_and_close(url, "/translate", {"q": [f"{number} dogs are playing." for number in range(900)]})
        answer = httpx.post(f"{url}/translate", json={"q": ENGLISH[0], "source": "en", "target": "de"}, timeout=60)
        assert answer.json() == post(q=ENGLISH[0]).json()
        wait_until(lambda: metrics_of(url)["hf_deqnar_disconnected_total"] == 1)
        wait_until(lambda: metrics_of(url)["hf_deqnar_waiting_texts"] == 0)
        metrics = metrics_of(url)
    assert metrics["hf_deqnar_active_requests"] == 0
    assert metrics["hf_deqnar_batch_size_sum"] < 900


def events_of(text: str) -> list[tuple[str, dict]]:
    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


def test_drafts_are_streamed_before_the_translation(post):
    answer = post("/translate/stream", q=" ".join(ENGLISH[:2]))
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.text)
    translations = [data for name, data in events if name == "translation"]
    assert [data["source"] for data in translations] == ENGLISH[:2]
    whole = post(q=" ".join(ENGLISH[:2])).json()["translatedText"]
    assert events[-1] == ("done", {"translatedText": whole})
    for sentence in (0, 1):
        names = [name for name, data in events if data.get("sentence") == sentence]
        assert names[-1] == "translation"
        assert names[:-1] == ["draft"] * (len(names) - 1) != []
        evaluations = [data["evaluation"] for name, data in events if name == "draft" and data["sentence"] == sentence]
        assert evaluations == sorted(set(evaluations))
        assert evaluations[-1] <= translations[sentence]["nfe"]


def test_a_stream_has_the_glossary_and_placeholders_of_translate(translator):
    glossary = Glossary({"train station": "Hauptbahnhof", "dogs": "Hunde"})
    text = (
        "- Where is the train station? See https://example.org, {name}.\n- Two dogs are\n  playing in the snow.\n\n"
        "42\n{name}\n\nI like {{ tea }} and the train station, %s."
    )
    with running(translator, glossary=glossary) as url:
        translated = ask(url, q=text).json()["translatedText"]
        request = {"q": text, "source": "en", "target": "de"}
        events = events_of(httpx.post(f"{url}/translate/stream", json=request, timeout=60).text)
    assert events[-1] == ("done", {"translatedText": translated})
    assert translated.count("Hauptbahnhof") == 2
    translations = [data for name, data in events if name == "translation"]
    assert [data["sentence"] for data in translations] == list(range(len(translations)))
    assert translations[0]["source"] == "Where is the train station?"
    assert "Hauptbahnhof" in translations[0]["text"]
    assert translations[1]["source"] == "See https://example.org, {name}."
    assert "https://example.org" in translations[1]["text"]
    shown = [data["text"] for _, data in events if "text" in data]
    assert any(shown)
    assert not [draft for draft in shown if MARK.search(draft)]
    assert not [data for name, data in events if name == "draft" and data["sentence"] == 1 and "17" in data["text"]]


def test_a_stream_of_a_text_without_words_is_the_text(post):
    events = events_of(post("/translate/stream", q=" 42\n\n7 ").text)
    assert [name for name, _ in events] == ["translation", "translation", "done"]
    assert events[0][1] == {"sentence": 0, "source": "42", "text": "42", "nfe": 0}
    assert events[-1][1] == {"translatedText": " 42\n\n7 "}


def test_a_stream_refuses_alternatives(post):
    answer = post("/translate/stream", q="Hi.", alternatives=1)
    assert (answer.status_code, "without alternatives" in answer.json()["error"]) == (400, True)


def test_a_client_that_leaves_a_stream_ends_its_work(translator):
    with running(translator) as url:
        send_and_close(url, "/translate/stream", {"q": "Two dogs are playing. " * 500}, read=b"event: draft")
        wait_until(lambda: metrics_of(url)["hf_deqnar_disconnected_total"] == 1)
        answer = httpx.post(f"{url}/translate", json={"q": "Hi.", "source": "en", "target": "de"}, timeout=10)
        assert answer.status_code == 200
        assert metrics_of(url)["hf_deqnar_active_requests"] == 0


LARGE = 1_000_001


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"not json", 400, "not valid JSON"),
        (b'{"q": "caf\xe9"}', 400, "not valid UTF-8 at byte 11"),
        (b"[" * 100_000, 400, "not valid JSON"),
        (b"[]", 400, "The body: Input should be"),
        (b"{}", 400, "q: Field required"),
        (b'{"q": 1, "source": "en", "target": "de"}', 400, "q"),
        (b'{"q": "Hi.", "source": "fr", "target": "de"}', 400, "fr is not supported as source"),
        (b'{"q": "Hi.", "source": "en", "target": "fr"}', 400, "fr is not supported as target"),
        (b'{"q": "Hi.", "source": "en", "target": "de", "format": "pdf"}', 400, "format: Input should be"),
        (b'{"q": "\\ud800", "source": "en", "target": "de"}', 400, "not valid Unicode"),
        (json.dumps({"q": ["a"] * 1001, "source": "en", "target": "de"}).encode(), 400, "1,000 texts, not 1,001"),
        (json.dumps({"q": "a" * 100_001, "source": "en", "target": "de"}).encode(), 400, "100,000 characters"),
        (b"a" * LARGE, 413, "The body is larger than 1,000,000 bytes"),
        (b"a" * 10_000_000, 413, "The body is larger than 1,000,000 bytes"),
    ],
)
@pytest.mark.parametrize("path", ["/translate", "/translate/stream"])
def test_a_wrong_request_gets_a_clear_answer(url, path, body, status, message):
    answer = httpx.post(f"{url}{path}", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert message in answer.json()["error"]


def test_a_body_without_length_is_limited_while_it_arrives(url):
    answer = httpx.post(
        f"{url}/translate", content=(b"a" * 50_000 for _ in range(200)), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 413


def test_another_content_type_path_or_method_is_refused(url):
    assert httpx.post(f"{url}/translate", content=b"a", headers={"content-type": "text/plain"}).status_code == 415
    assert httpx.get(f"{url}/nothing").json() == {"error": "Not Found"}
    assert httpx.get(f"{url}/translate").status_code == 405
    form = {"content-type": "application/x-www-form-urlencoded"}
    answer = httpx.post(f"{url}/translate", content=b"q=%ff&source=en&target=de", headers=form)
    assert (answer.status_code, answer.json()["error"]) == (400, "A form field is not valid UTF-8.")


def test_a_body_that_does_not_arrive_is_given_up(translator):
    with running(translator, body_seconds=0.2) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"POST /translate HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
            connection.settimeout(10)
            assert connection.recv(4096).startswith(b"HTTP/1.1 408")


def test_more_requests_or_texts_than_allowed_are_refused_and_the_others_served(translator):
    async def ask_all(url):
        async with httpx.AsyncClient(timeout=60) as client:
            requests = [{"q": text, "source": "en", "target": "de"} for text in real_sentences(20)]
            return await asyncio.gather(*(client.post(f"{url}/translate", json=request) for request in requests))

    with running(translator, max_requests=2, batch_delay=0.2) as url:
        answers = asyncio.run(ask_all(url))
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 503}
        assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 503)
    with running(translator, max_waiting=10) as url:
        many = httpx.post(f"{url}/translate", json={"q": "One. Two! " * 10, "source": "en", "target": "de"})
        assert many.status_code == 503
        assert "More than 10 sentences" in many.json()["error"]
        one = httpx.post(f"{url}/translate", json={"q": "One.", "source": "en", "target": "de"}, timeout=60)
        assert one.status_code == 200


def test_a_key_is_required_if_the_server_has_keys(translator):
    with running(translator, api_keys=frozenset({"secret", "other"})) as url:
        request = {"q": "Hi.", "source": "en", "target": "de"}
        for path in ("/translate", "/translate/stream"):
            assert httpx.post(url + path, json=request).status_code == 403
            assert httpx.post(url + path, json={**request, "api_key": "sécret"}).status_code == 403
            assert httpx.post(url + path, json={**request, "api_key": "secret"}, timeout=60).status_code == 200
        assert httpx.get(f"{url}/languages").status_code == 200


def test_languages_and_health(url):
    assert httpx.get(f"{url}/languages").json() == [{"code": "en", "name": "English", "targets": ["de"]}]
    assert httpx.get(f"{url}/health").json()["status"] == "ok"


@pytest.fixture(scope="module")
def small_url(translator):
    with running(translator, max_characters=500, max_texts=20) as url:
        yield url


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_the_server_follows_its_openapi_description(small_url, mode):
    """Requests that fit the description are accepted, others refused, and all responses are as described."""
    described = schemathesis.openapi.from_url(f"{small_url}/openapi.json")
    operations = [found.ok() for found in described.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/translate", "/translate/stream", "/languages", "/health"}
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and operation.method == "get":
            continue  # without parameters, nothing can be wrong

        @settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=HealthCheck)
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case):
            case.call_and_validate(timeout=60)

        check()
