"""The trainer's text, tokens and batches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.kit.skips import needs

pytest.importorskip("pyarrow", reason=needs("train"))

import pyarrow
import pyarrow.parquet
import torch

from trainer.config import from_mapping
from trainer.corpus import read_corpus
from trainer.data import PackedSequences, TrainingBatches, evaluation_batches
from trainer.schema import Config, ConfigError, DataConfig
from trainer.tokens import open_tokens, prepare_tokens

POEM = [f"line {number}: the quick brown fox jumps over the lazy dog" for number in range(40)]


def texts(**settings: object) -> list[str]:
    train, held_out = read_corpus(DataConfig(holdout=0.0, **settings))  # type: ignore[arg-type]
    assert held_out == []
    return train


def test_text_jsonl_parquet_and_folders_hold_the_same_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(POEM))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"body": text, "n": 1}) + "\n" for text in POEM))
    pyarrow.parquet.write_table(pyarrow.table({"body": POEM, "n": list(range(40))}), tmp_path / "c.parquet")
    (tmp_path / "ignored.bin").write_bytes(b"\xff\xfe")
    settings = {"text_field": "body", "document_separator": "\n\n"}
    for name in ("a.txt", "b.jsonl", "c.parquet"):
        assert texts(paths=(str(tmp_path / name),), **settings) == POEM
    assert texts(paths=(str(tmp_path),), **settings) == 3 * POEM


@pytest.mark.parametrize(
    ("name", "content", "settings", "message"),
    [
        ("x.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', {}, r"^data\.text_field: .*x\.jsonl:2 has no text field 'text'"),
        ("x.jsonl", b'{"text": "a"}\n{"text": \n', {}, r"^data\.paths: .*x\.jsonl:2 is not a JSON line"),
        ("x.txt", b"\xff\xfe\xff", {}, r"^data\.paths: cannot read .*x\.txt"),
        ("x.txt", b"  \n", {}, r"^data\.paths: no text found"),
        ("x.txt", b"one document", {"holdout": 0.1}, r"^data\.holdout: a single document cannot be split"),
        ("x.parquet", b"not parquet", {}, r"^data\.paths: cannot read .*x\.parquet"),
    ],
)
def test_unusable_text_is_refused_by_key(
    tmp_path: Path, name: str, content: bytes, settings: dict[str, float], message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_corpus(DataConfig(paths=(str(tmp_path / name),), **({"holdout": 0.0} | settings)))


def test_missing_paths_columns_and_suffixes_are_refused_by_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data\.paths: no such file or folder: .*gone"):
        texts(paths=(str(tmp_path / "gone"),))
    with pytest.raises(ConfigError, match=r"^data\.eval_paths: no such file or folder: .*gone"):
        read_corpus(DataConfig(max_bytes=10_000, eval_paths=(str(tmp_path / "gone"),)))
    with pytest.raises(ConfigError, match=r"^data\.paths: no file under .* ends in one of \.txt"):
        texts(paths=(str(tmp_path),))
    pyarrow.parquet.write_table(pyarrow.table({"n": [1, 2]}), tmp_path / "c.parquet")
    with pytest.raises(ConfigError, match=r"^data\.text_field: .*c\.parquet has no column 'text'"):
        texts(paths=(str(tmp_path),))
    with pytest.raises(ConfigError, match=r"^data\.text_field: .* holds 1, not text"):
        texts(paths=(str(tmp_path),), text_field="n")


def test_standard_library_is_the_default_and_is_limited() -> None:
    first, again = texts(max_bytes=200_000), texts(max_bytes=200_000)
    assert first == again
    assert sum(len(text.encode()) for text in first) == pytest.approx(200_000, abs=4)  # the cut may be in a character
    assert len(first) > 3
    assert any("import" in text for text in first)


def test_held_out_documents_do_not_depend_on_order_and_are_not_trained_on(tmp_path: Path) -> None:
    for name, documents in (("a", POEM), ("b", POEM[::-1] + POEM[:5])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    splits = [read_corpus(DataConfig(paths=(str(tmp_path / f"{name}.jsonl"),), holdout=0.1)) for name in "ab"]
    assert set(splits[0][1]) == set(splits[1][1])
    assert len(set(splits[0][1])) == 4
    for train, held_out in splits:
        assert not set(train) & set(held_out)


def config(tmp_path: Path, **changes: dict[str, object]) -> Config:
    raw: dict[str, dict[str, object]] = {
        "model": {"config": {}},
        "data": {"max_bytes": 60_000, "sequence_length": 32, "cache_dir": str(tmp_path / "cache")},
        "tokenizer": {"vocab_size": 300},
    }
    for section, values in changes.items():
        raw[section] = raw.get(section, {}) | values
    return from_mapping(raw)


def test_tokens_are_cached_by_content_and_settings(tmp_path: Path) -> None:
    first = prepare_tokens(config(tmp_path))
    stamp = (first / "train.npy").stat().st_mtime_ns
    assert prepare_tokens(config(tmp_path)) == first
    assert (first / "train.npy").stat().st_mtime_ns == stamp
    others = {
        prepare_tokens(config(tmp_path, tokenizer={"vocab_size": 310})),
        prepare_tokens(config(tmp_path, data={"max_bytes": 50_000})),
    }
    assert first not in others
    assert len(others) == 2
    (tmp_path / "poem.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in POEM))
    poem = [config(tmp_path, data={"paths": [str(tmp_path / "poem.jsonl")], "holdout": share}) for share in (0.1, 0.5)]
    assert prepare_tokens(poem[0]) != prepare_tokens(poem[1])
    assert not list(first.parent.glob("*.tmp"))


def test_tokens_decode_to_the_documents_and_a_local_tokenizer_is_used(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    settings = config(tmp_path)
    tokens = open_tokens(prepare_tokens(settings), settings)
    assert tokens.vocab_size == 300
    assert tokens.largest_id < 300
    tokenizer = AutoTokenizer.from_pretrained(tokens.tokenizer_folder)
    train, held_out = read_corpus(settings.data)
    end = tokenizer.eos_token
    assert tokenizer.decode(tokens.train) == "".join(text + end for text in train)
    assert tokenizer.decode(tokens.evaluation) == "".join(text + end for text in held_out)

    local = config(tmp_path, tokenizer={"path": str(tokens.tokenizer_folder)})
    again = open_tokens(prepare_tokens(local), local)
    assert again.folder != tokens.folder
    assert np.array_equal(again.train, tokens.train)
    for path in (tmp_path / "gone", tmp_path):
        with pytest.raises(ConfigError, match=r"^tokenizer\.path: "):
            prepare_tokens(config(tmp_path, tokenizer={"path": str(path)}))


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    short = config(tmp_path, data={"sequence_length": 2048, "max_bytes": 1500, "holdout": 0.0})
    with pytest.raises(ConfigError, match=r"^data\.paths: \d+ tokens are fewer than one sequence needs \(2049\)"):
        open_tokens(prepare_tokens(short), short)


def test_targets_are_the_next_tokens_except_after_a_separator() -> None:
    ids = np.array([5, 6, 0, 7, 8, 9, 0, 3, 4], dtype=np.int32)
    inputs, targets = PackedSequences(ids, 4, separator=0, ignore_index=-7).batch(np.array([1, 0, -1]))
    assert inputs[:2].tolist() == [[8, 9, 0, 3], [5, 6, 0, 7]]
    assert targets.tolist() == [[9, 0, -7, 4], [6, 0, -7, 8], [-7] * 4]
    assert targets.dtype == torch.int64


@pytest.mark.parametrize(("accumulation", "ranks"), [(1, 1), (4, 1), (1, 2), (2, 2)])
def test_batches_depend_on_seed_and_step_only(accumulation: int, ranks: int) -> None:
    data = PackedSequences(np.arange(101, dtype=np.int32), 10, separator=-1, ignore_index=-100)
    whole = TrainingBatches(data, 4, 1, 0, 1, seed=3)
    parts = [TrainingBatches(data, 4, accumulation, rank, ranks, seed=3) for rank in range(ranks)]
    for step in (7, 0, 2, 2):
        micro = [part.step(step) for part in parts]
        assert all(len(batches) == accumulation for batches in micro)
        rows = torch.cat([micro[rank][number][0] for number in range(accumulation) for rank in range(ranks)])
        assert torch.equal(rows, whole.step(step)[0][0])
    # 10 sequences: 2.5 steps are one epoch, each of it seen once.
    seen = torch.cat([whole.step(step)[0][0] for step in range(5)])[:, 0].tolist()
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(0, 100, 10))
    assert seen[:10] != seen[10:]
    assert not torch.equal(TrainingBatches(data, 4, 1, 0, 1, seed=4).step(0)[0][0], whole.step(0)[0][0])


@pytest.mark.parametrize(("rows", "ranks"), [(1, 1), (3, 1), (2, 2), (4, 3)])
def test_evaluation_counts_each_sequence_once(rows: int, ranks: int) -> None:
    data = PackedSequences(np.arange(101, dtype=np.int32), 10, separator=-1, ignore_index=-100)
    per_rank = [list(evaluation_batches(data, 7, rows, rank, ranks)) for rank in range(ranks)]
    assert len({len(batches) for batches in per_rank}) == 1
    targets = torch.cat([targets for batches in per_rank for _, targets in batches])
    assert sorted(targets[targets != -100].tolist()) == list(range(1, 71))
