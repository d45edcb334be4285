"""The trainer's configuration: what is refused, and that each message names the key."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kit.skips import needs

pytest.importorskip("yaml", reason=needs("train"))

from trainer.config import from_mapping, load_config, to_mapping
from trainer.modes import MODES, make_mode
from trainer.parallel import Ranks, SetupError, pick_device
from trainer.schema import Config, ConfigError
from trainer.setup import prepare

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def override(*changes: str) -> Config:
    return load_config(str(QUICKSTART), changes)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_load(path: Path) -> None:
    config = load_config(str(path))
    assert from_mapping(to_mapping(config)) == config


def test_overrides_are_typed_yaml() -> None:
    config = override("train.steps=7", "optimizer.lr=1e-3", "optimizer.max_grad_norm=null", "data.paths=[a.txt, b]")
    assert (config.train.steps, config.optimizer.lr, config.optimizer.max_grad_norm) == (7, 1e-3, None)
    assert config.data.paths == ("a.txt", "b")
    assert override("data.paths=a.txt").data.paths == ("a.txt",)
    assert override("loss=torch").loss == "torch"
    assert override("loss.logits_budget=2MiB").loss == {"type": "flce", "logits_budget": "2MiB"}


@pytest.mark.parametrize(
    ("change", "key", "says"),
    [
        ("train.batch_siz=8", "train.batch_siz", "did you mean 'batch_size'?"),
        ("trian.steps=8", "trian", "did you mean 'train'?"),
        ("optimizer.zzz=1", "optimizer.zzz", "known here: lr, "),
        ("model.config.hidden=8", "model.config.hidden", "did you mean 'hidden_size'?"),
        ("train.steps=many", "train.steps", "expects an integer, got 'many' (str)"),
        ("train.steps=1.5", "train.steps", "expects an integer"),
        ("train.steps=true", "train.steps", "expects an integer, got True (bool)"),
        ("train.steps=0", "train.steps", "must be at least 1, got 0"),
        ("train=3", "train", "expects a mapping"),
        ("train.dtype=float8", "train.dtype", "expects float32 or bfloat16"),
        ("output.export=1", "output.export", "expects true or false"),
        ("optimizer.lr=-1e-3", "optimizer.lr", "must be greater than 0, got -0.001"),
        ("optimizer.lr=.nan", "optimizer.lr", "must be finite"),
        (f"optimizer.lr={10**400}", "optimizer.lr", "must be finite"),
        ("optimizer.betas=[0.9]", "optimizer.betas", "expects 2 values, got 1"),
        ("optimizer.betas=[0.9, x]", "optimizer.betas[1]", "expects a number"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas", "[0, 1)"),
        ("data.paths=3", "data.paths", "expects a list"),
        ("data.sequence_length=4096", "data.sequence_length", "max_position_embeddings 2048"),
        ("tokenizer.vocab_size=100", "tokenizer.vocab_size", "must be at least 257"),
        ("model.path=somewhere", "model.path", "excludes model.config"),
        ("model.config=null", "model", "give config"),
        ("model.config.num_attention_heads=3", "model.config.num_attention_heads", "does not divide hidden_size 128"),
        ("model.config.num_key_value_heads=3", "model.config.num_key_value_heads", "does not divide"),
        ("loss=fancy", "loss", "expects torch or a mapping"),
        ("loss.type=fancy", "loss.type", "expects flce"),
        ("loss.label_smothing=0.1", "loss.label_smothing", "did you mean 'label_smoothing'"),
        ("loss.label_smoothing=2", "loss.label_smoothing", "[0, 1]"),
        ("loss.logits_budget=lots", "loss.logits_budget", "lots"),
        ("loss.reduction=sum", "loss.reduction", "mean"),
        ("train.steps", "train.steps", "key=value"),
        ("train.steps=[", "train.steps", "not valid YAML"),
        ("seed.x=1", "seed.x", "seed is set to 0"),
    ],
)
def test_bad_setting_is_refused_by_key(change: str, key: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        override(change)
    assert caught.value.key == key
    assert str(caught.value).startswith(f"{key}: ")
    assert says in str(caught.value)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--config: cannot read .*missing\.yaml"):
        load_config(str(tmp_path / "missing.yaml"))
    file = tmp_path / "twice.yaml"
    file.write_text("seed: 1\nseed: 2\n")
    with pytest.raises(ConfigError, match="duplicate key 'seed'"):
        load_config(str(file))
    file.write_text("- seed\n")
    with pytest.raises(ConfigError, match="must hold a mapping, got list"):
        load_config(str(file))
    file.write_text("seed: 1\n")
    with pytest.raises(ConfigError, match=r"^model: is required"):
        load_config(str(file))


def test_batch_must_divide_over_ranks_and_accumulation() -> None:
    two = Ranks(rank=0, size=2, local_rank=0, local_size=2)
    with pytest.raises(ConfigError, match=r"^train\.batch_size: 6 .* 2 data-parallel ranks x 2 accumulation"):
        make_mode(override("train.batch_size=6", "train.accumulation=2", "parallel.mode=data"), two)
    make_mode(override("train.batch_size=6", "train.accumulation=2", "parallel.mode=tensor"), two)


@pytest.mark.parametrize(
    ("name", "says"),
    [("tensr", "did you mean 'tensor'?"), ("zzz", "known: tensor, data, fsdp, fsdp+tensor, deepspeed")],
)
def test_unknown_parallel_mode_names_the_known_ones(name: str, says: str) -> None:
    one = Ranks(rank=0, size=1, local_rank=0, local_size=1)
    with pytest.raises(ConfigError, match=f"^{re.escape(f'parallel.mode: unknown mode {name!r}; {says}')}$"):
        make_mode(override(f"parallel.mode={name}"), one)


@pytest.mark.parametrize(
    ("changes", "key", "says"),
    [
        (("parallel.tensor_size=2",), "tensor_size", "is not for parallel.mode tensor"),
        (("parallel.mode=data", "parallel.head=sharded"), "head", "is not for parallel.mode data"),
        (("parallel.mode=fsdp", "parallel.tensor_size=2"), "tensor_size", "is for parallel.mode fsdp+tensor"),
        (("parallel.mode=fsdp", "parallel.head=sharded", "loss=torch"), "head", "sharded needs loss.type flce"),
        (("parallel.mode=fsdp+tensor",), "tensor_size", "needs the number of ranks that share a vocabulary"),
        (("parallel.mode=fsdp+tensor", "parallel.tensor_size=3"), "tensor_size", "3 does not divide the 4 processes"),
        (("parallel.mode=fsdp+tensor", "parallel.tensor_size=2", "parallel.head=gathered"), "head", "is for"),
    ],
    ids=str,
)
def test_keys_of_one_mode_are_refused_in_the_others(changes: tuple[str, ...], key: str, says: str) -> None:
    four = Ranks(rank=0, size=4, local_rank=0, local_size=4)
    with pytest.raises(ConfigError, match=rf"^parallel\.{key}: .*{re.escape(says)}"):
        make_mode(override(*changes), four)


def test_more_processes_than_gpus_is_refused() -> None:
    many = Ranks(rank=0, size=1000, local_rank=0, local_size=1000)
    with pytest.raises(ConfigError, match=r"^parallel\.device: 1000 processes"):
        pick_device(override("parallel.device=cuda"), many)


def test_quickstart_makes_at_least_four_chunks_a_step() -> None:
    from flce_dist import VocabShard
    from flce_dist.plan import chunk_rows
    from trainer.config import loss_options

    config = override()
    assert config.train.steps >= 60
    tokens = config.train.batch_size // config.train.accumulation * config.data.sequence_length
    options = loss_options(config.loss)
    columns = VocabShard.even(config.tokenizer.vocab_size, 0, 2).num_columns
    rows = chunk_rows(tokens, columns, 64, 4, options.budget_bytes, options.chunk_rows)
    assert tokens / rows >= 4


@pytest.mark.parametrize(("dtype", "rows"), [("bfloat16", 128), ("float32", 32)])
def test_rows_of_the_summary_are_those_of_the_loop(dtype: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 rows, but two chunks where they spare a float32 accumulator."""
    from flce_dist import VocabParallelHead, plan
    from tests.kit.trace import Trace
    from trainer.model import logits_facts

    width, vocab_size, tokens = 64, 256, 256
    parameters = getattr(torch, dtype)
    monkeypatch.setattr(plan, "default_budget", lambda *_: 32 * vocab_size * parameters.itemsize)
    monkeypatch.setattr(plan, "GROWN_MULTIPLE", 128)
    head = VocabParallelHead(width, vocab_size, dtype=parameters)
    text = SimpleNamespace(vocab_size=vocab_size, hidden_size=width)
    causal_lm = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))
    model: Any = SimpleNamespace(head=head, causal_lm=causal_lm)
    assert logits_facts(override(), model, tokens)["chunk_rows"] == rows
    hidden = torch.zeros(tokens, width, dtype=parameters, requires_grad=True)
    with Trace() as trace:
        head(hidden, torch.zeros(tokens, dtype=torch.int64))
    products = [
        left[0] for left, right, *_ in (e.shapes for e in trace.matrix_products) if right == (width, vocab_size)
    ]
    assert products == [rows] * (tokens // rows)


def dotted_keys(cls: type, where: str = "") -> list[str]:
    import typing

    keys = []
    for name, hint in typing.get_type_hints(cls).items():
        inner = [choice for choice in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(choice)]
        keys += dotted_keys(inner[0], f"{where}{name}.") if inner else [where + name]
    return keys


def test_docs_explain_every_key_and_mode() -> None:
    text = (ROOT / "docs" / "training.md").read_text()
    missing = [key for key in dotted_keys(Config) if f"`{key}`" not in text]
    missing += [mode for mode in MODES if f"`{mode}`" not in text]
    assert not missing


def _quick(output: Path, *changes: str) -> list[str]:
    return [f"output.dir={output}", "output.export=false", "checkpoint.every=0", "train.steps=1", *changes]


def _refused(*overrides: str) -> str:
    with pytest.raises(SetupError) as error:
        prepare(str(QUICKSTART), overrides, Ranks(0, 1, 0, 1))
    return str(error.value)


@pytest.mark.parametrize("overwrite", ["true", "false"])
def test_a_folder_of_something_else_is_not_written_to(tmp_path: Path, overwrite: str) -> None:
    mine = tmp_path / "model" / "mine.bin"
    mine.parent.mkdir()
    mine.write_text("x")
    assert "output.dir" in _refused(*_quick(tmp_path, f"output.overwrite={overwrite}"))
    assert mine.read_text() == "x"


def test_an_empty_output_folder_name_is_refused() -> None:
    assert "output.dir" in _refused("output.dir=''")


def test_resume_does_not_replace_a_finished_run(tmp_path: Path) -> None:
    for name, text in (("metrics.jsonl", "{}"), ("config.yaml", "seed: 0"), ("loss.png", "x")):
        (tmp_path / name).write_text(text)
    changes = _quick(tmp_path, "checkpoint.resume=true", "output.overwrite=false")
    assert "finished run" in _refused(*changes)
    assert (tmp_path / "metrics.jsonl").read_text() == "{}"


def test_a_broken_config_of_the_run_to_resume_is_named(tmp_path: Path) -> None:
    for name, text in (("metrics.jsonl", "{}"), ("config.yaml", "a: [")):
        (tmp_path / name).write_text(text)
    assert "checkpoint.resume" in _refused(*_quick(tmp_path, "checkpoint.resume=true", "output.overwrite=false"))


@pytest.mark.parametrize(
    "change",
    ["loss.backend=triton", "loss.accum_dtype=bfloat16", "loss.logits_dtype=float64", "loss.logits_dtype=float16"],
)
def test_what_the_loss_would_refuse_in_the_first_step_is_refused_before(tmp_path: Path, change: str) -> None:
    key = change.partition("=")[0]
    assert key in _refused(*_quick(tmp_path / "new", change, "parallel.device=cpu"))
    assert not (tmp_path / "new").exists()


def test_ranks_that_disagree_are_told_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(0, 2, 0, 2)
    monkeypatch.setattr(Ranks, "gather", lambda self, value: [value, value | {"train.batch_size": 8}])
    with pytest.raises(SetupError, match=r"train\.batch_size: \[4, 8\]") as error:
        ranks.same_everywhere("the configuration", {"train.batch_size": 4, "seed": 0})
    assert "seed" not in str(error.value)


def test_a_cache_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "data.cache_dir" in _refused(*_quick(tmp_path / "new", f"data.cache_dir={tmp_path / 'file'}"))


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert "tokenizer.path" in _refused(*_quick(tmp_path / "new", f"tokenizer.path={tmp_path}"))


def test_a_broken_checkpoint_is_named(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason=needs("train"))
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.LlamaConfig(**sizes, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no safetensors")
    assert "model.path" in _refused(*_quick(tmp_path / "new", f"model.path={tmp_path}", "model.config=null"))


def test_a_mapping_as_a_yaml_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("? [a, b]\n: 1\n")
    with pytest.raises(ConfigError, match="YAML"):
        load_config(str(path))
