"""Reading parallel text.

Formats: JSONL, TSV and CSV (each also gzipped), Parquet, two aligned text files (as in fairseq's data folders), and
everything that the `datasets` library loads. Files may also be at addresses such as `s3://bucket/train.jsonl.gz`.
"""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from ..utils.storage import Store, is_address, matching


@dataclass
class Pair:
    """A source sentence and its reference translations; training uses the first one."""

    source: str
    references: list[str]


def read_parallel(path: str | Path, source: str, target: str) -> list[Pair]:
    """Read all sentence pairs of a corpus.

    Args:
        path: a file ending in `.jsonl`, `.tsv`, `.csv` (or those + `.gz`) or `.parquet`; the common prefix of two
            aligned text files, `corpus` for `corpus.en` and `corpus.de`, or `iwslt14.tokenized.de-en/train`; or
            `datasets:name,configuration,split`, where the configuration may be empty. A file may be at an address of
            fsspec, such as `s3://bucket/train.jsonl.gz`; several, in the order of their names, at one with `*`.
        source, target: names of the columns, usually languages such as `en` and `de`. They may also be keys of a column
            `translation`, as in many data sets.
    """
    if str(path).startswith("datasets:"):
        pairs = list(_read_dataset(str(path), source, target))
    elif is_address(path):
        pairs = [pair for one in matching(str(path)) for pair in _read_named(one, PurePath(one), source, target)]
    else:
        pairs = _read_file(Path(path), source, target)
    if not pairs:
        raise ValueError(f"{path} contains no sentence pairs.")
    return pairs


def pairs_of_rows(
    rows: Iterable[dict[str, Any]],
    columns: list[str],
    *,
    source: str | None = None,
    target: str | None = None,
    name: str = "The data set",
) -> list[Pair]:
    """Sentence pairs of the rows of a data set with texts.

    Args:
        rows: such as a `datasets.Dataset`.
        columns: names of its columns.
        source, target: columns with the texts, or languages that are keys of a column `translation`. By default
            `source`, and `target` or `references`.
        name: of the data set, for errors.

    >>> pairs_of_rows([{"translation": {"de": "Ja.", "en": "Yes."}}], ["translation"], source="en", target="de")
    [Pair(source='Yes.', references=['Ja.'])]
    """
    chosen = "source" if source is None else source
    if target is None:
        target = "references" if "target" not in columns and "references" in columns else "target"
    rows = list(rows)
    translation = rows[0].get("translation") if rows else None
    keys = list(translation) if isinstance(translation, dict) else columns
    if chosen not in keys or target not in keys:
        languages = f" with the languages {', '.join(keys)}" if keys is not columns else ""
        raise ValueError(
            f"{name} has the columns {', '.join(columns)}{languages}, but {chosen} and {target} are needed as the "
            "texts: name others with source=… and target=…, or tokenize it with hf_deqnar.tokenize_pairs."
        )
    pairs = [_pair(row, chosen, target, name, number) for number, row in enumerate(rows, start=1)]
    if not pairs:
        raise ValueError(f"{name} contains no sentence pairs.")
    return pairs


def merge_repeated_sources(pairs: list[Pair]) -> list[Pair]:
    """Merge pairs with the same source into one pair with all of their references.

    >>> merge_repeated_sources([Pair("Hi.", ["Hallo!"]), Pair("Go.", ["Geh."]), Pair("Hi.", ["Grüß Gott!"])])
    [Pair(source='Hi.', references=['Hallo!', 'Grüß Gott!']), Pair(source='Go.', references=['Geh.'])]
    """
    merged: dict[str, list[str]] = {}
    for pair in pairs:
        merged.setdefault(pair.source, []).extend(pair.references)
    return [Pair(source, list(dict.fromkeys(references))) for source, references in merged.items()]


def _read_file(path: Path, source: str, target: str) -> list[Pair]:
    if path.is_dir():
        raise ValueError(
            f"{path} is a folder; name a file in it or a prefix of aligned files, such as {path / 'train'}."
        )
    return _read_named(path, path, source, target) if path.is_file() else _read_aligned(path, source, target)


def _read_named(path: Path | str, name: PurePath, source: str, target: str) -> list[Pair]:
    """The pairs of a file, or of an address, in the format that its name has."""
    formats = {".jsonl": _read_jsonl, ".tsv": _read_tsv, ".csv": _read_csv, ".parquet": _read_parquet}
    ending = [suffix for suffix in name.suffixes if suffix != ".gz"][-1:]
    if not ending or ending[0] not in formats:
        raise ValueError(f"{path}: unknown file format; the name should end in {', '.join(formats)}, or those + .gz.")
    return list(formats[ending[0]](path, source, target))


def _open(path: Path | str) -> BinaryIO:
    if isinstance(path, Path):
        return path.open("rb")
    content = Store(path).read()
    if content is None:
        raise FileNotFoundError(f"There is no {path}.")
    return io.BytesIO(content)


def _lines(path: Path | str) -> Iterator[tuple[int, str]]:
    """Numbered lines of a file; decoded one by one, so that an error names its line."""
    number = 0
    with _open(path) as opened:
        file: Iterable[bytes] = gzip.GzipFile(fileobj=opened) if str(path).endswith(".gz") else opened
        try:
            for number, raw in enumerate(file, start=1):
                try:
                    text = raw.rstrip(b"\r\n").decode("utf-8")
                    yield number, text.removeprefix("\ufeff") if number == 1 else text  # byte order mark
                except UnicodeDecodeError as error:
                    raise ValueError(f"{path}, line {number}: not valid UTF-8 at byte {error.start + 1}.") from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} is damaged after line {number}: {error}") from error


def _read_jsonl(path: Path | str, source: str, target: str) -> Iterator[Pair]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not valid JSON ({error.msg}).") from error
        except (RecursionError, ValueError) as error:  # brackets in brackets, or a number with thousands of digits
            raise ValueError(f"{path}, line {number}: JSON that is nested too deeply or has a huge number.") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: not a JSON object with {source} and {target}.")
        yield _pair(record, source, target, path, number)


def _read_tsv(path: Path | str, source: str, target: str) -> Iterator[Pair]:
    rows = ((number, line.split("\t")) for number, line in _lines(path))
    yield from _read_table(rows, source, target, path)


def _read_csv(path: Path | str, source: str, target: str) -> Iterator[Pair]:
    reader = csv.reader(f"{line}\n" for _, line in _lines(path))  # a quoted cell may contain line breaks
    try:
        yield from _read_table(((reader.line_num, row) for row in reader), source, target, path)
    except csv.Error as error:  # such as a field beyond csv's size limit after an unclosed quote
        raise ValueError(f"{path}, line {reader.line_num}: not valid CSV ({error}).") from error


def _read_table(rows: Iterator[tuple[int, list[str]]], source: str, target: str, path: Path | str) -> Iterator[Pair]:
    """Pairs of numbered rows, of which the first contains the column names."""
    _, names = next(rows, (1, []))
    for number, cells in rows:
        if cells in ([], [""]):  # an empty line
            continue
        if len(cells) != len(names):
            raise ValueError(f"{path}, line {number}: {len(cells)} columns, but the first line names {len(names)}.")
        yield _pair(dict(zip(names, cells, strict=True)), source, target, path, number)


def _read_parquet(path: Path | str, source: str, target: str) -> Iterator[Pair]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ImportError("Reading Parquet files needs pyarrow: pip install 'hf_deqnar[train]'.") from error
    with _open(path) as file:
        try:
            records = parquet.read_table(file).to_pylist()
        except (ArrowException, OSError, UnicodeDecodeError) as error:  # pyarrow raises OSError for damaged pages
            raise ValueError(f"{path} is not a Parquet file, or damaged: {error}") from error
    for number, record in enumerate(records, start=1):
        yield _pair(record, source, target, path, number)


def _read_dataset(name: str, source: str, target: str) -> Iterator[Pair]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError("Reading data sets by name needs datasets: pip install 'hf_deqnar[train]'.") from error
    parts = name.removeprefix("datasets:").split(",")
    if len(parts) != 3:
        raise ValueError(f"'{name}' should be datasets:name,configuration,split; the configuration may be empty.")
    for number, record in enumerate(load_dataset(parts[0], parts[1] or None, split=parts[2]), start=1):
        yield _pair(record, source, target, name, number)


def _pair(record: dict, source: str, target: str, path: Path | str, number: int) -> Pair:
    record = record["translation"] if isinstance(record.get("translation"), dict) else record
    for column in (source, target):
        if column not in record:
            raise ValueError(f"{path}, line {number}: no column {column}; there are {', '.join(map(str, record))}.")
    references = record[target] if isinstance(record[target], list) else [record[target]]
    if not references or not all(isinstance(text, str) for text in (record[source], *references)):
        raise ValueError(f"{path}, line {number}: {source} and {target} must be text, with at least one reference.")
    if not all(is_unicode(text) for text in (record[source], *references)):
        raise ValueError(f"{path}, line {number}: not valid Unicode, an unpaired surrogate such as \\ud800.")
    return Pair(record[source], references)


def is_unicode(text: str) -> bool:
    r"""Whether a text has no unpaired surrogates, which JSON can contain, but no tokenizer accepts.

    >>> is_unicode("\U0001f600"), is_unicode("\ud83d")
    (True, False)
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_aligned(path: Path, source: str, target: str) -> list[Pair]:
    files = [Path(f"{path}.{language}") for language in (source, target)]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"There is neither a file {path} nor a pair {files[0]} and {files[1]}.")
    sides = [[line for _, line in _lines(file)] for file in files]
    if len(sides[0]) != len(sides[1]):
        raise ValueError(
            f"{files[0]} has {len(sides[0]):,} lines but {files[1]} has {len(sides[1]):,}; "
            "aligned files must have one line per pair."
        )
    return [Pair(left, [right]) for left, right in zip(*sides, strict=True)]


def evenly_spaced(items: list[Any], count: int | None) -> list[int]:
    """Evenly spaced indices into a list, to sample a corpus that may be sorted.

    Args:
        items: the list.
        count: number of indices; all if None or more than there are items.

    >>> evenly_spaced(list("abcdefgh"), 3)
    [0, 2, 5]
    """
    count = len(items) if count is None else min(count, len(items))
    return [number * len(items) // count for number in range(count)]
