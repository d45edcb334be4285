"""Tokenizer and token files, made once by one process and cached.

The cache is a folder named by a hash of the documents and of every setting that changes the tokens. It is written
beside its final place and renamed, so that a reader never sees half of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
import transformers
from numpy.typing import NDArray

from . import chat
from .config import ignore_index
from .corpus import read_corpus
from .data import PackedSequences, evaluation_batches
from .schema import Config, ConfigError

END_OF_TEXT = "<|endoftext|>"
FORMAT = 2  # part of the key: raise it when the files' content changes meaning
WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".npy", ".npz", ".gguf", ".h5", ".msgpack", ".distcp"})
ENCODE_BATCH = 256  # documents tokenized at a time


@dataclass(frozen=True)
class TokenFiles:
    """The cached folder: `tokenizer/`, `train.npy` and `eval.npy` (int32 ids; `~id` where a token is read but not
    learned) and `info.json`."""

    folder: Path
    vocab_size: int
    separator: int
    train: NDArray[np.int32]
    evaluation: NDArray[np.int32]
    info: dict[str, int]

    @property
    def largest_id(self) -> int:
        return self.info["largest_id"]

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder / "tokenizer"


def prepare_tokens(config: Config) -> Path:
    """Read the corpus and make the cached folder unless it is there; returns it. One process per machine calls this.

    Raises:
        ConfigError: unreadable text, a tokenizer that cannot be used, or too little text.
    """
    train, held_out = read_corpus(config.data)
    folder = Path(config.data.cache_dir) / f"tokens-{_key(config, train, held_out)}"
    if folder.is_dir():
        return folder
    work = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    try:
        work.mkdir(parents=True)
    except OSError as error:
        raise ConfigError("data.cache_dir", f"cannot write to {config.data.cache_dir}: {error}") from error
    try:
        tokenizer = _local_tokenizer(config) if config.tokenizer.path else _train_bpe(config, train)
        if config.tokenizer.chat_template is not None:
            tokenizer.chat_template = _chat_template(config)
        if config.data.messages_field:
            chat.check_tokenizer(tokenizer, config.tokenizer.path)
        tokenizer.save_pretrained(str(work / "tokenizer"))
        ids = {
            name: _encode_chats(tokenizer, texts) if config.data.messages_field else _encode(tokenizer, texts)
            for name, texts in (("train", train), ("eval", held_out))
        }
        for name, array in ids.items():
            np.save(work / f"{name}.npy", array)
        info = {
            "vocab_size": len(tokenizer),
            "separator": tokenizer.eos_token_id,
            "largest_id": max(int(np.maximum(array, ~array).max(initial=0)) for array in ids.values()),
            "learned": int((ids["train"] >= 0).sum()),
            "documents": len(train) + len(held_out),
            "bytes": sum(len(text.encode()) for text in [*train, *held_out]),
        }
        (work / "info.json").write_text(json.dumps(info, indent=2))
        try:
            work.rename(folder)
        except OSError:
            # Another run with the same corpus was faster; its content is the same.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def open_tokens(folder: Path, config: Config) -> TokenFiles:
    """Map the cached files into memory. Raises ConfigError: too short for one sequence, or without a token to learn."""
    info = json.loads((folder / "info.json").read_text())
    files = TokenFiles(
        folder,
        info["vocab_size"],
        info["separator"],
        np.load(folder / "train.npy", mmap_mode="r"),
        np.load(folder / "eval.npy", mmap_mode="r"),
        info,
    )
    _check_sequences(files, files.train, "data.paths", None, config)
    if config.train.eval_every:
        name = "data.eval_paths" if config.data.eval_paths else "data.holdout"
        _check_sequences(files, files.evaluation, name, config.train.eval_sequences, config)
    return files


def _check_sequences(files: TokenFiles, ids: NDArray[np.int32], key: str, most: int | None, config: Config) -> None:
    """Raises ConfigError, unless the first `most` sequences (None: all) are one at least, with a token to learn."""
    length = config.data.sequence_length
    if len(ids) <= length:
        raise ConfigError(key, f"{len(ids)} tokens are fewer than one sequence needs ({length + 1})")
    data = PackedSequences(ids, length, files.separator, ignore_index(config))
    batches = evaluation_batches(data, len(data) if most is None else most, 1, 0, 1)
    if not any((targets != data.ignore_index).any() for _, targets in batches):
        which = "no sequence" if most is None else f"none of the first {most} sequences (train.eval_sequences)"
        raise ConfigError(key, f"{which} holds a token that is learned")


def _key(config: Config, train: Iterable[str], held_out: Iterable[str]) -> str:
    digest = hashlib.sha256()
    tokenizer = config.tokenizer
    template = None if tokenizer.chat_template is None else _chat_template(config)
    settings = [FORMAT, tokenizers.__version__, tokenizer.path, tokenizer.vocab_size, template]
    digest.update(json.dumps([*settings, config.data.messages_field is not None]).encode())
    if tokenizer.path is not None:
        for file in sorted(Path(tokenizer.path).rglob("*")):
            if file.is_file() and file.suffix not in WEIGHTS:  # a checkpoint's folder holds those too
                digest.update(f"{file.name} {file.stat().st_size}\n".encode())
                digest.update(file.read_bytes())
    for name, documents in (("train", train), ("eval", held_out)):
        for text in documents:
            content = text.encode()
            digest.update(f"{name} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()[:16]


def _chat_template(config: Config) -> str:
    path = str(config.tokenizer.chat_template)
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("tokenizer.chat_template", f"cannot read {path}: {error}") from error


def _train_bpe(config: Config, documents: list[str]) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE: any text can be encoded, and no id stands for "unknown"."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=config.tokenizer.vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = map(chat.text_of, documents) if config.data.messages_field else documents
    tokenizer.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


def _local_tokenizer(config: Config) -> transformers.PreTrainedTokenizerBase:
    path = str(config.tokenizer.path)
    if not Path(path).is_dir():
        raise ConfigError("tokenizer.path", f"no such folder: {path}")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # a broken file surfaces as whatever its reader makes of it; some raise plain Exception
        raise ConfigError("tokenizer.path", f"{path} holds no usable tokenizer: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError("tokenizer.path", f"{path} has no end-of-text token to put between documents")
    return tokenizer


def _encode(tokenizer: transformers.PreTrainedTokenizerBase, documents: list[str]) -> NDArray[np.int32]:
    """All documents as one row of ids, each followed by the separator."""
    parts = [np.empty(0, dtype=np.int32)]
    for start in range(0, len(documents), ENCODE_BATCH):
        encoded = tokenizer(documents[start : start + ENCODE_BATCH], add_special_tokens=False, verbose=False)
        parts += [np.array([*ids, tokenizer.eos_token_id], dtype=np.int32) for ids in encoded["input_ids"]]
    return np.concatenate(parts)


def _encode_chats(tokenizer: transformers.PreTrainedTokenizerBase, documents: list[str]) -> NDArray[np.int32]:
    """All conversations as one row of ids, each followed by the separator, which is not learned."""
    parts = [np.empty(0, dtype=np.int32)]
    parts += [np.array([*chat.encode(tokenizer, text), ~tokenizer.eos_token_id], dtype=np.int32) for text in documents]
    return np.concatenate(parts)
