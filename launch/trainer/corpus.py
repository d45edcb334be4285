"""Documents of text: from files and folders the user names, or the Python standard library's own source."""

from __future__ import annotations

import hashlib
import json
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet

from .chat import check_text, conversation, documented_functions
from .schema import ConfigError, DataConfig


def read_corpus(data: DataConfig) -> tuple[list[str], list[str]]:
    """Training and held-out documents: text, or with `data.messages_field` the JSON of conversations. Raises
    ConfigError.

    The held-out ones are those of `data.eval_paths`, or else the share `data.holdout` of the documents, chosen by a
    hash of their text: the choice does not depend on the order, and equal documents are on the same side.
    """
    documents = _limited(_documents(data, data.paths, "data.paths"), data)
    if not documents:
        raise ConfigError("data.paths", "no text found")
    if data.eval_paths:
        return documents, _limited(_documents(data, data.eval_paths, "data.eval_paths"), data)
    if data.holdout == 0:
        return documents, []
    digests = [hashlib.sha256(text.encode()).digest() for text in documents]
    distinct = sorted(set(digests))
    if len(distinct) < 2:
        raise ConfigError(
            "data.holdout",
            "a single document cannot be split; name data.eval_paths, cut it by data.document_separator, or set 0",
        )
    held_out = set(distinct[: max(1, round(data.holdout * len(distinct)))])
    train = [text for text, digest in zip(documents, digests, strict=True) if digest not in held_out]
    return train, [text for text, digest in zip(documents, digests, strict=True) if digest in held_out]


def _documents(data: DataConfig, paths: tuple[str, ...], key: str) -> Iterator[str]:
    if not paths:
        for source in _standard_library():
            yield from documented_functions(source) if data.messages_field else [source]
    for path in paths:
        for file in _files(Path(path), data.suffixes, key):
            try:
                yield from (text for text in _read(file, data) if text.strip())
            except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
                raise ConfigError(key, f"cannot read {file}: {error}") from error


def _files(path: Path, suffixes: tuple[str, ...], key: str) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(key, f"no such file or folder: {path}")
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix in suffixes)
    if not files:
        raise ConfigError(key, f"no file under {path} ends in one of {', '.join(suffixes)} (data.suffixes)")
    return files


def _read(file: Path, data: DataConfig) -> Iterator[str]:
    """The documents of one file: a JSON line, a parquet row, a text file or its separated parts."""
    if file.suffix == ".jsonl":
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _json_document(line, data, f"{file}:{number}")
    elif file.suffix == ".parquet":
        table = pyarrow.parquet.ParquetFile(file)
        key = "data.messages_field" if data.messages_field else "data.text_field"
        name = data.messages_field or data.text_field
        if name not in table.schema_arrow.names:
            raise ConfigError(key, f"{file} has no column {name!r}: {table.schema_arrow.names}")
        for batch in table.iter_batches(columns=[name]):
            for value in batch.column(0).to_pylist():
                if data.messages_field:
                    yield conversation(value, f"{file} column {name!r}")
                elif isinstance(value, str):
                    yield value
                else:
                    raise ConfigError(key, f"{file} column {name!r} holds {value!r}, not text")
    elif data.messages_field:
        raise ConfigError("data.messages_field", f"{file}: conversations are read from .jsonl and .parquet files")
    elif data.document_separator:
        yield from file.read_text(encoding="utf-8").split(data.document_separator)
    else:
        yield file.read_text(encoding="utf-8")


def _json_document(line: str, data: DataConfig, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError("data.paths", f"{where} is not a JSON line: {error}") from error
    name = data.messages_field or data.text_field
    value = record.get(name) if isinstance(record, dict) else None
    if data.messages_field:
        return conversation(value, where)
    if not isinstance(value, str):
        raise ConfigError("data.text_field", f"{where} has no text field {name!r}")
    check_text(value, "data.text_field", where)
    return value


def _standard_library() -> Iterator[str]:
    """The .py files of this Python's standard library, without its tests.

    In the order of a hash of their names: `data.max_bytes` then keeps a sample of everything rather than the
    modules from a to d.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "site-packages", "dist-packages", "__pycache__"}
    files = [file.relative_to(root) for file in root.rglob("*.py")]
    files = [file for file in files if not skipped.intersection(file.parts)]
    for file in sorted(files, key=lambda name: hashlib.sha256(name.as_posix().encode()).digest()):
        with tokenize.open(root / file) as source:  # honours the file's coding line
            text = source.read()
        if text.strip():
            yield text


def _limited(documents: Iterator[str], data: DataConfig) -> list[str]:
    """The first `data.max_bytes` of UTF-8 text; the last document is cut there, the last conversation left out."""
    max_bytes = data.max_bytes
    if max_bytes is None:
        return list(documents)
    kept: list[str] = []
    left = max_bytes
    for text in documents:
        content = text.encode()
        if len(content) > left and data.messages_field:
            break
        content = content[:left]
        kept.append(content.decode(errors="ignore"))  # the cut may be inside a character
        left -= len(content)
        if left == 0:
            break
    return kept
