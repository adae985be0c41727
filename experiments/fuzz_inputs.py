"""Unusual texts, damaged files, requests and configurations, drawn from a seeded generator."""

import csv
import gzip
import io
import json
import math
import random
import string
from typing import Any

from hf_deqnar import DeqNarConfig
from hf_deqnar.models.deqnar.configuration_deqnar import CHOICES

SENTENCES = (
    "A man is riding a horse.",
    "Mr. Smith left at 7.45 p.m. from platform 3.",
    '"Really?" she asked. I don\'t know, he said; nobody does.',
    "Wo ist der Bahnhof? Das weiß ich nicht.",
    "See https://a.org/x?y=1&z=2, mail a.b@c.org, or call +49 (0)30 12.",
    "{name} has %d of %(count)s files; ${HOME} {{ x }} <%= y %>.",
)
CHARACTERS = (
    string.ascii_letters,
    string.digits,
    string.punctuation,
    " \t\n\r\v\f\x1c\x1d\x1e\x1f\x85\xa0\u2028\u2029\u200b\u3000\ufeff",  # white space
    "".join(map(chr, range(32))) + "\x7f\x80\x9f",
    "äöüßéñçøåłşİıẞﬁŉΑάЖй",
    "\u0300\u0301\u0327\u0489\u20dd\u0e47",  # combining characters
    "中文字かなカ한글ไทย\u0915\u094d\u0937",
    "אבגد\u200f\u202e\u2066\u2069عربی",  # right to left
    "😀👩\u200d👩\u200d👧🇩🇪✌🏽\ufe0f\u2603",
    "\ue000\ue001\uf8ff\U000f0000\ufffd\ufffe\uffff\U0010ffff",  # private use, no characters
    "\ud800\udbff\udc00\udfff",  # surrogates
    "“”„‘’‚«»‹›—–…。！？¿¡•",
)
FRAGMENTS = (
    *("<s>", "</s>", "<pad>", "<mask>", "<blank>", "<unk>", "\u0120", "\u2581"),
    *("<a ", '<a href="', "</a>", "<b>", "</b>", "<br/>", "<!--", "-->", "<script>", "</script>", "<pre>", "<p>"),
    *("<b translate=no>", "<![CDATA[", "<?xml", "&amp;", "&#0;", "&#xD800;", "&#x110000;", "&#" + "9" * 5000 + ";"),
    *("# ", "- ", "* ", "1. ", "> ", "| ", "|--|", "```", "`", "**", "__", "~~", "[", "](", "![", "[^", "]:", "---\n"),
    *("1\n", "00:00:01,000 --> 00:00:02,000\n", "\n\n", "\r\n", "{\\an8}", "<i>", "</i>", "$", "\\"),
    *("{", "}", "{{", "}}", "%s", "%(", "<%", "${", "http://", "www.", "@", "a@b.c", "e.g. ", "z.B. ", "Dr. ", "3. "),
    *("\t", ",", '"', '""', "'", "\x00", "null", "NaN", "1e999", "-0", "[" * 2000, '{"en":', "\\ud800", "\\u0000"),
)  # fmt: skip
NUMBER_OF_KINDS = 5


def draw_length(random: random.Random, longest: int) -> int:
    """A length: most are short, one in 200 is up to the longest."""
    share = random.random()
    limit = longest if share < 0.005 else min(longest, 3000) if share < 0.04 else min(longest, 200)
    return int(math.exp(random.uniform(0, math.log(limit))))


def draw_text(random: random.Random, longest: int, *, surrogates: bool = True) -> str:
    """Sentences, random characters, markup, one part many times, or a mixture of these."""
    length, kind = draw_length(random, longest), random.randrange(NUMBER_OF_KINDS)
    if kind == 0:
        text = damage(random, " ".join(random.choices(SENTENCES, k=1 + length // 50)), 1 + length // 50)
    elif kind == 1:
        text = "".join(random.choices("".join(random.sample(CHARACTERS, 3)), k=length))
    elif kind == 2:
        text = "".join(random.choice(random.choice((FRAGMENTS, CHARACTERS, SENTENCES))) for _ in range(length // 5))
    elif kind == 3:
        part = "".join(draw_part(random) for _ in range(random.randint(1, 3)))
        text = draw_part(random) + part * (length // max(1, len(part))) + draw_part(random)
    else:
        text = "\n".join(draw_text(random, max(2, length // 4)) for _ in range(4))
    text = text[:longest]
    return text if surrogates else text.encode("utf-8", "ignore").decode()


def draw_part(random: random.Random) -> str:
    """A piece of markup, a character, or nothing."""
    return random.choice((random.choice(FRAGMENTS), random.choice(random.choice(CHARACTERS)), ""))


def damage(random: random.Random, text: str, times: int) -> str:
    """The text with parts deleted, repeated, exchanged or inserted."""
    for _ in range(times):
        first, second = sorted(random.randint(0, len(text)) for _ in range(2))
        middle = random.choice(("", text[first:second] * 2, text[first:second][::-1], draw_part(random)))
        text = text[:first] + middle + text[second:][: 4 * len(text)]
    return text


def damage_bytes(random: random.Random, data: bytes) -> bytes:
    """The data with some bytes changed, inserted or cut off."""
    changed = bytearray(data)
    for _ in range(random.choice((0, 0, 0, 0, 1, 2, 8))):
        place = random.randint(0, len(changed))
        new = random.choice((b"\xff", b"\x00", b"\xc3", b"\xed\xa0\x80", b"\n", b"\r", random.randbytes(4)))
        action = random.randrange(3)
        if action == 0:
            changed[place : place + len(new)] = new
        elif action == 1:
            changed[place:place] = new
        else:
            del changed[place:]
    return bytes(changed)


def draw_value(random: random.Random, depth: int = 0) -> Any:
    """A value of JSON."""
    simple = (None, True, False, 0, -1, 1.5, 10**30, float("nan"), float("inf"), "", "de", draw_text(random, 50))
    if depth > 2 or random.random() < 0.7:
        return random.choice(simple)
    values = [draw_value(random, depth + 1) for _ in range(random.randrange(4))]
    return values if random.random() < 0.5 else {str(index): value for index, value in enumerate(values)}


def draw_rows(random: random.Random) -> list[dict[str, Any]]:
    """Rows of a parallel corpus, some of them unusual."""
    rows: list[dict[str, Any]] = []
    surrogates, unusual = random.random() < 0.1, random.random() < 0.4
    for _ in range(random.choice((0, 1, 1, 2, 3, 5))):
        row: dict[str, Any] = {name: draw_text(random, 3000, surrogates=surrogates) for name in ("en", "de")}
        change = random.random() if unusual else 1.0
        if change < 0.1:
            row[random.choice(("en", "de"))] = draw_value(random)
        elif change < 0.2:
            row["de"] = [draw_text(random, 100) for _ in range(random.randrange(3))]
        elif change < 0.3:
            row = {"translation": row}
        elif change < 0.35:
            del row[random.choice(("en", "de"))]
        rows.append(row)
    return rows


def draw_jsonl(random: random.Random) -> bytes:
    lines = [json.dumps(row, ensure_ascii=random.random() < 0.5) for row in draw_rows(random)]
    if random.random() < 0.2:
        lines.insert(
            random.randint(0, len(lines)), random.choice((json.dumps(draw_value(random)), "[" * 100_000, "9" * 5000))
        )
    return damage_bytes(random, random.choice(("\n", "\r\n")).join(lines).encode("utf-8", "surrogatepass"))


def draw_table(random: random.Random, delimiter: str) -> bytes:
    """A TSV or CSV file; half of the TSV files have cells with tabs and line breaks, which are errors."""
    file = io.StringIO()
    write = csv.writer(file).writerow if delimiter == "," else lambda cells: file.write("\t".join(cells) + "\n")
    write(random.choice((*[["en", "de"]] * 4, ["de", "en"], ["en", "de", "en"], ["en"], ["", "de", "en"])))
    clean = delimiter == "\t" and random.random() < 0.5
    for row in draw_rows(random):
        cells = [str(value) for value in row.values()]
        write([" ".join(cell.split()) for cell in cells] if clean else cells)
    return damage_bytes(random, file.getvalue().encode("utf-8", "surrogatepass"))


def draw_parquet(random: random.Random) -> bytes:
    import pyarrow
    from pyarrow import parquet

    columns = {
        name: random.choice(
            (
                *[[draw_text(random, 100, surrogates=False) for _ in range(3)]] * 6,
                [b"\xff", b"a", None],
                [1, 2, None],
                [["a"], [], ["b", None]],
                [{"en": "a", "de": "b"}, None, {"en": "c"}],
            )
        )
        for name in random.choice((("en", "de"), ("en", "de", "translation"), ("translation",), ("x",)))
    }
    file = io.BytesIO()
    compression = random.choice(("none", "snappy", "gzip"))
    parquet.write_table(pyarrow.table(columns), file, compression=compression)
    return damage_bytes(random, file.getvalue())


def draw_glossary(random: random.Random) -> bytes:
    lines = [f"{draw_text(random, 40)}\t{draw_text(random, 40)}" for _ in range(random.randrange(5))]
    return damage_bytes(random, "\n".join(lines).encode("utf-8", "surrogatepass"))


def draw_document(random: random.Random) -> str:
    """A text. One in 300 is long and has one part many times, which is slow where patterns are searched badly."""
    if random.random() < 1 / 300:
        part = "".join(draw_part(random) for _ in range(random.randint(1, 2))) or " "
        return draw_part(random) + part * (random.randint(20_000, 100_000) // len(part)) + draw_part(random)
    return draw_text(random, 100_000)


def draw_subtitles(random: random.Random) -> str:
    """Cues with any text; some of their numbers and times are damaged."""
    cues = []
    for number in range(1, random.randint(2, 5)):
        text = draw_document(random) if random.random() < 0.5 else draw_text(random, 300)
        if random.random() < 0.9:
            text = text.replace("\n\n", "\n")
        cues.append(f"{number}\n00:00:0{number},000 --> 00:00:0{number},500\n{text}\n\n")
    return damage(random, "".join(cues), random.choice((0, 0, 0, 1, 2)))


def draw_gzip(random: random.Random) -> bytes:
    return damage_bytes(random, gzip.compress(draw_jsonl(random)))


def draw_sides(random: random.Random) -> tuple[bytes, bytes]:
    """Two text files, half of which have as many lines as each other."""
    sides = [[draw_text(random, 200, surrogates=False) for _ in range(3)] for _ in range(2)]
    if random.random() < 0.5:
        sides = [[" ".join(line.split()) for line in side] for side in sides]
    first, second = ("\n".join(side).encode() for side in sides)
    return damage_bytes(random, first), second


def draw_request(random: random.Random) -> tuple[str, str, bytes]:
    """A request to the server: path, type of the content, body."""
    fields: dict[str, Any] = {"q": draw_text(random, 3000), "source": "en", "target": "de"}
    if random.random() < 0.2:
        fields["q"] = [draw_text(random, 500) for _ in range(random.randrange(5))]
    if random.random() < 0.3:
        fields["format"] = random.choice(("html", "html", "text", "srt", 1))
    if random.random() < 0.2:
        fields["alternatives"] = random.choice((0, 1, 2, 10, 11, -1, 1.0, 1e300, "1", None))
    for _ in range(random.choice((0, 0, 0, 0, 1))):
        fields[random.choice(("q", "source", "target", "format", "alternatives", "api_key", "x"))] = draw_value(random)
    path = "/translate/stream" if random.random() < 0.2 else "/translate"
    kind = "application/json"
    if random.random() < 0.1:
        kind = random.choice(
            ("application/x-www-form-urlencoded", "text/plain", "", "application/json; charset=x", "\x01")
        )
    body = json.dumps(fields, ensure_ascii=random.random() < 0.5).encode("utf-8", "surrogatepass")
    if "form" in kind:
        body = "&".join(f"{name}={value}" for name, value in fields.items()).encode("utf-8", "surrogatepass")
    if random.random() < 0.1:
        body = random.choice((b"", b"[" * 100_000, b"9" * 5000, b"null", b"[]", b"\xff\xfe{}", random.randbytes(50)))
    return path, kind, damage_bytes(random, body) if random.random() < 0.2 else body


# Values that a field rarely or never can have. Sizes stay small, because a large model is not an error.
UNUSUAL = (
    0,
    1,
    2,
    3,
    5,
    7,
    -1,
    1000,
    0.0,
    0.5,
    1.0,
    -0.5,
    1e-30,
    1e30,
    math.nan,
    math.inf,
    True,
    False,
    None,
    "",
    "x",
    "1",
    [],
    {},
)
USUAL: dict[str, tuple] = {
    "d_model": (8, 16),
    "encoder_attention_heads": (1, 2, 4),
    "decoder_attention_heads": (1, 2, 4),
    "max_position_embeddings": (64, 128),
    "max_nfe": (1, 2, 3, 8),
    "tol": (1e-3, 1e-8, 0.5, 1),
    "memory": (1, 2, 5),
    "damping": (1.0, 0.5, 1e-3),
    "gradient_steps": (1, 2),
    "gradient_max_nfe": (1, 3),
    "gradient_damping": (1.0, 0.5),
    "dropout": (0, 0.0, 0.1, 0.9),
    "length_offsets": (1, 2, 8),
    "ctc_upsampling": (1, 2, 3),
    "dag_upsampling": (2, 4),
    "dag_link_heads": (1, 2),
    "latent_dim": (1, 4),
    "weight_norm_clip": (None, 1.0, 0.1),
    "scale_embedding": (True, False),
    "tie_word_embeddings": (True, True, False),
    "layernorm_embedding": (True, False),
    "input_predictor": (True, False),
    "activation_function": ("relu", "gelu", "silu"),
    "latent_free_bits": (0.0, 0.5),
    "latent_kl_factor": (0.0, 1.0),
    "length_loss_factor": (0.0, 0.1),
}
VOCABULARY = 24


def draw_configuration(random: random.Random) -> dict[str, Any]:
    """Fields of a small configuration. Half of all have no unusual value; most of those are valid."""
    fields: dict[str, Any] = {"vocab_size": VOCABULARY, "encoder_layers": 1, "decoder_layers": random.choice((1, 2))}
    fields |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "d_model": 16, "max_position_embeddings": 64, "max_nfe": 4}
    fields |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "length_offsets": 4}
    choices = {**CHOICES, **USUAL}
    for name in random.sample(sorted(choices), random.choice((1, 3, 6))):
        fields[name] = random.choice(choices[name])
    if random.random() < 0.5:
        names = sorted({*choices, *DeqNarConfig.__dataclass_fields__} & DeqNarConfig.__annotations__.keys())
        for _ in range(random.choice((1, 1, 2))):
            fields[random.choice(names)] = random.choice(UNUSUAL)
    return fields
