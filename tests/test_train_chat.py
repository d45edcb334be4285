"""Fine-tuning on conversations: what is learned of them, what is refused, and a run."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.kit.skips import needs

pytest.importorskip("pyarrow", reason=needs("train"))

import pyarrow
import pyarrow.parquet
import safetensors.torch
import transformers

from tests.kit.runs import Workplace
from trainer.chat import documented_functions
from trainer.config import from_mapping
from trainer.corpus import read_corpus
from trainer.data import PackedSequences
from trainer.parallel import Ranks, SetupError
from trainer.report import read_metrics
from trainer.schema import Config, ConfigError, TokenizerConfig, TrainConfig
from trainer.setup import prepare
from trainer.tokens import open_tokens, prepare_tokens

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = str(ROOT / "configs" / "chatml.jinja")
CHATS = [
    [
        {"role": "system", "content": "You add numbers — exactly."},
        {"role": "user", "content": f"What is {number} and {number}?"},
        {"role": "assistant", "content": f"It is {2 * number}."},
        {"role": "user", "content": "Thank you ünd goodbye"},
        {"role": "assistant", "content": "Bye!"},
    ]
    for number in range(30)
]


def config(folder: Path, chats: object = CHATS, template: str | None = TEMPLATE, **data: object) -> Config:
    file = folder / "chats.jsonl"
    if isinstance(chats, list):
        file.write_text("".join(json.dumps({"talk": chat}) + "\n" for chat in chats))
    paths = {"paths": [str(file)], "messages_field": "talk", "holdout": 0.1, "sequence_length": 16}
    return from_mapping(
        {
            "model": {"config": {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}},
            "data": paths | {"cache_dir": str(folder / "cache")} | data,
            "tokenizer": {"vocab_size": 300, "chat_template": template},
        }
    )


def test_answers_are_learned_and_nothing_else(tmp_path: Path) -> None:
    settings = config(tmp_path, holdout=0.0)
    tokens = open_tokens(prepare_tokens(settings), settings)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokens.tokenizer_folder)
    ids = np.asarray(tokens.train)
    documents = [tokenizer.apply_chat_template(chat, tokenize=False) + tokenizer.eos_token for chat in CHATS]
    assert tokenizer.decode(np.maximum(ids, ~ids)) == "".join(documents)
    answers = [f"It is {2 * number}.<|im_end|>\nBye!<|im_end|>\n" for number in range(30)]
    assert tokenizer.decode(ids[ids >= 0]) == "".join(answers)
    assert tokens.info["learned"] == (ids >= 0).sum()
    # The targets of a batch are those, each behind the token before it.
    inputs, targets = PackedSequences(ids, 16, tokens.separator, -100).batch(np.arange(4))
    assert inputs.min() >= 0
    learned = np.where(ids < 0, -100, ids)[1:65].reshape(4, 16)
    assert np.array_equal(targets.numpy(), learned)


def test_sequences_without_an_answer_are_refused(tmp_path: Path) -> None:
    """A mean over no token cannot be taken: an evaluation would end the run in the middle."""
    question = {"role": "user", "content": " ".join(map(str, range(100)))}
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"talk": [question, CHATS[0][-1]]}) + "\n")
    settings = config(tmp_path, eval_paths=[str(tmp_path / "held_out.jsonl")])
    folder = prepare_tokens(settings)
    open_tokens(folder, settings)
    few = dataclasses.replace(settings, train=TrainConfig(eval_every=1, eval_sequences=2))
    with pytest.raises(ConfigError, match=r"^data\.eval_paths: none of the first 2 sequences .* holds a token that is"):
        open_tokens(folder, few)
    open_tokens(folder, dataclasses.replace(settings, train=TrainConfig(eval_every=1, eval_sequences=100)))
    (tmp_path / "bare.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    silent = [[question, {"role": "assistant", "content": ""}]]
    empty = config(tmp_path, silent, str(tmp_path / "bare.jinja"), holdout=0.0)
    with pytest.raises(ConfigError, match=r"^data\.paths: no sequence holds a token that is learned"):
        open_tokens(prepare_tokens(empty), empty)


def test_jsonl_and_parquet_hold_the_same_conversations(tmp_path: Path) -> None:
    from_lines = read_corpus(config(tmp_path).data)
    pyarrow.parquet.write_table(pyarrow.table({"talk": CHATS}), tmp_path / "chats.parquet")
    from_table = read_corpus(config(tmp_path, paths=[str(tmp_path / "chats.parquet")]).data)
    assert from_lines == from_table
    kept = read_corpus(config(tmp_path, max_bytes=1000, holdout=0.0).data)[0]
    assert kept == [json.dumps(chat) for chat in CHATS][: len(kept)]
    assert sum(map(len, kept)) <= 1000


def test_without_files_it_is_about_the_standard_library(tmp_path: Path) -> None:
    documents, _ = read_corpus(config(tmp_path, paths=[], max_bytes=20_000).data)
    assert len(documents) > 10
    question, answer = json.loads(documents[0])
    assert question["role"] == "user"
    assert "def " in question["content"]
    assert answer["content"] not in question["content"]
    source = 'def f(x):\n    """Double it.\n\n    Really.\n    """\n    return 2 * x\n'
    expected = "What does this function do?\n\ndef f(x):\n    return 2 * x"
    assert [json.loads(text) for text in documented_functions(source)] == [
        [{"role": "user", "content": expected}, {"role": "assistant", "content": "Double it."}]
    ]


LOOKS_AHEAD = "{% for m in messages %}{{ m.content }}{{ '?' if loop.last else '+' }}{% endfor %}"


@pytest.mark.parametrize(
    ("line", "template", "message"),
    [
        ({"talk": "hello"}, TEMPLATE, r"^data\.messages_field: .*:1 holds no list of messages"),
        ({"talk": []}, TEMPLATE, r"^data\.messages_field: .*:1 holds no list"),
        ({"other": 1}, TEMPLATE, r"^data\.messages_field: .*:1 holds no list"),
        (
            {"talk": [{"role": "user"}]},
            TEMPLATE,
            r"^data\.messages_field: .*:1: expects messages with role and content",
        ),
        ({"talk": CHATS[0][:2]}, TEMPLATE, r"^data\.messages_field: .*:1 has no answer"),
        ({"talk": [*CHATS[0][:2], {"role": "assistant", "content": "\ud800"}]}, TEMPLATE, r"surrogate pair, \\ud800"),
        ({"talk": CHATS[0]}, None, r"^tokenizer\.chat_template: the tokenizer has none"),
        ({"talk": CHATS[0]}, "missing.jinja", r"^tokenizer\.chat_template: cannot read"),
        ({"talk": CHATS[0]}, "{{ nothing.at.all }}", r"^tokenizer\.chat_template: fails for a conversation"),
        ({"talk": CHATS[0]}, LOOKS_AHEAD, r"^tokenizer\.chat_template: renders the same turn in two ways"),
    ],
)
def test_unusable_conversations_are_refused_by_key(
    line: dict[str, object], template: str | None, message: str, tmp_path: Path
) -> None:
    if template is not None and "{" in template:
        (tmp_path / "template.jinja").write_text(template)
        template = str(tmp_path / "template.jinja")
    (tmp_path / "chats.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ConfigError, match=message):
        prepare_tokens(config(tmp_path, None, template, holdout=0.0))


def test_text_files_hold_no_conversations(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(ConfigError, match=r"^data\.messages_field: .*a\.txt: conversations are read from \.jsonl"):
        read_corpus(config(tmp_path, paths=[str(tmp_path / "a.txt")]).data)


def test_half_a_character_in_text_is_refused_by_key(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a\\ud800"}\n')
    with pytest.raises(ConfigError, match=r"^data\.text_field: .*x\.jsonl:1 holds half of a surrogate pair"):
        read_corpus(config(tmp_path, paths=[str(tmp_path / "x.jsonl")], messages_field=None).data)


def test_the_token_cache_knows_every_file_of_a_tokenizer(tmp_path: Path) -> None:
    first = prepare_tokens(config(tmp_path))
    local = tmp_path / "local"
    shutil.copytree(first / "tokenizer", local)
    settings = dataclasses.replace(config(tmp_path), tokenizer=TokenizerConfig(path=str(local)))
    one = prepare_tokens(settings)
    (local / "model.safetensors").write_bytes(b"weights do not matter")
    assert prepare_tokens(settings) == one
    (local / "chat_template.jinja").write_text(Path(TEMPLATE).read_text().replace("im_end", "end"))
    assert prepare_tokens(settings) != one


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def pretrained(place: Workplace) -> Path:
    return place.here("pretrained", "train.steps=2", "train.eval_every=0", "output.export=true") / "model"


def test_fine_tuning_goes_on_from_an_export_and_skips_prompts(
    place: Workplace, pretrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the fused loss, with ignored tokens left out before the first logit, and with all logits: the same."""
    from_export = [f"model.path={pretrained}", f"tokenizer.path={pretrained}", "model.config=null"]
    chats = [f"tokenizer.chat_template={TEMPLATE}", "data.messages_field=messages"]
    chats += ["train.steps=3", "train.eval_every=3"]
    losses_of = {"fused": "{type: flce}", "skip": "{type: flce, skip_ignored: true}", "torch": "torch"}
    runs = {name: place.here(name, *from_export, *chats, f"loss={loss}") for name, loss in losses_of.items()}
    losses = {
        name: [record.get("loss", record.get("eval_loss")) for record in read_metrics(run / "metrics.jsonl")]
        for name, run in runs.items()
    }
    said = capsys.readouterr().out
    assert said.count("chunks of ") == said.count("those of tokens that are learned alone") == 1
    assert len(losses["torch"]) == 4
    assert losses["fused"] == pytest.approx(losses["torch"], rel=1e-5)
    assert losses["skip"] == pytest.approx(losses["torch"], rel=1e-5)


def test_a_checkpoint_without_some_of_its_layers_is_refused(place: Workplace, pretrained: Path, tmp_path: Path) -> None:
    """Its other layers would be trained from random values."""
    broken = tmp_path / "broken"
    shutil.copytree(pretrained, broken)
    weights = safetensors.torch.load_file(broken / "model.safetensors")
    kept = {name: value for name, value in weights.items() if "layers.1." not in name}
    safetensors.torch.save_file(kept, broken / "model.safetensors", metadata={"format": "pt"})
    arguments = place.arguments("broken", "model.config=null", f"model.path={broken}", f"tokenizer.path={broken}")
    with pytest.raises(SetupError, match=r"^model\.path: .* lacks \d+ of the weights .*layers\.1\."):
        prepare(arguments[1], arguments[2:], Ranks(0, 1, 0, 1))
