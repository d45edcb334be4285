"""TRL's SFTTrainer with the fused loss, step by step beside its own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit.skips import needs

transformers = pytest.importorskip("transformers", reason=needs("hf"))
datasets = pytest.importorskip("datasets", reason=needs("hf"))
trl = pytest.importorskip("trl", reason=needs("hf"))

import tokenizers  # noqa: E402

from flce_dist.integrations.transformers import UnsupportedForward, apply, apply_to_trainer  # noqa: E402
from tests.kit.causal_lm import tiny  # noqa: E402

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<end>{% endgeneration %}{% else %}{{ message.content }}<end>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer() -> Any:
    """Characters, and the roles of a chat."""
    special = ["<pad>", "<end>", "<user>", "<assistant>", "<system>"]
    characters = [chr(code) for code in range(32, 127)]
    vocab = {token: index for index, token in enumerate([*special, *characters])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<pad>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("<[a-z]+>|."), "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="<end>", chat_template=TEMPLATE,
        additional_special_tokens=special[2:],
    )  # fmt: skip


def chats() -> Any:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{a} + {b} ="}],
            "completion": [{"role": "assistant", "content": f"{a + b}"}],
        }
        for a in range(4)
        for b in range(3)
    ]
    return datasets.Dataset.from_list(rows)


def run(
    folder: Path, fused: bool, model: Any = None, peft_config: Any = None, config: Any = None, **options: Any
) -> Any:
    values = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": "none",
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_length": 32,
        "save_strategy": "no",
        "disable_tqdm": True,
        "bf16": False,
        "gradient_checkpointing": False,
        **(config or {}),
    }
    data = chats()
    trainer = trl.SFTTrainer(
        model=model or tiny(vocab_size=100), args=trl.SFTConfig(**values), train_dataset=data, eval_dataset=data,
        processing_class=tokenizer(), peft_config=peft_config,
    )  # fmt: skip
    trainer.handle = apply_to_trainer(trainer, **options) if fused else None
    trainer.train()
    return trainer


NAMES = ("loss", "grad_norm", "mean_token_accuracy", "entropy", "num_tokens")


def history(trainer: Any, names: tuple[str, ...] = NAMES) -> torch.Tensor:
    return torch.tensor(
        [[entry[name] for name in names] for entry in trainer.state.log_history if "grad_norm" in entry]
    )


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("Llama", {}),
        ("Llama", {"packing": True, "padding_free": False, "eval_packing": False}),
        ("Mixtral", {}),
    ],
    ids=["completions", "packed", "experts"],
)
def test_steps_and_metrics_are_those_of_the_trainers_own_loss(
    kind: str, config: dict[str, Any], tmp_path: Path
) -> None:
    results = []
    for fused in (False, True):
        experts = {"output_router_logits": True, "num_local_experts": 4} if kind == "Mixtral" else {}
        trainer = run(tmp_path, fused, tiny(kind, vocab_size=100, **experts), config=config)
        evaluation = trainer.evaluate()
        results.append(
            (history(trainer), torch.tensor([evaluation["eval_loss"], evaluation["eval_mean_token_accuracy"]]))
        )
    assert trainer.handle.output is not None
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_ignored_tokens_are_skipped(tmp_path: Path) -> None:
    """Prompts are masked; all that changes is that entropy is not known."""
    names = ("loss", "grad_norm", "mean_token_accuracy", "num_tokens")
    expected = history(run(tmp_path, fused=False), names)
    torch.testing.assert_close(
        history(run(tmp_path, fused=True, skip_ignored=True), names), expected, rtol=1e-4, atol=1e-5
    )


def test_dft_is_token_scaling(tmp_path: Path) -> None:
    expected = history(run(tmp_path, fused=False, config={"loss_type": "dft"}), ("loss", "grad_norm"))
    with pytest.raises(ValueError, match="token_scaling=True"):
        run(tmp_path, fused=True, config={"loss_type": "dft"})
    ours = history(run(tmp_path, fused=True, token_scaling=True), ("loss", "grad_norm"))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_metrics_that_need_logits_are_made_by_the_trainer_and_removal_undoes_all(tmp_path: Path) -> None:
    trainer = run(tmp_path, fused=True, eval_logits=True)
    trainer.compute_metrics = lambda prediction: {"width": prediction.predictions.shape[-1]}
    assert trainer.evaluate()["eval_width"] == 100
    fused = trainer.evaluate()["eval_loss"]
    trainer.handle.remove()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(fused, rel=1e-5)


def test_an_adapter_that_the_trainer_adds(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason=needs("hf"))
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
        results.append(history(run(tmp_path, fused, peft_config=config)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_apply_alone_says_what_an_sft_trainer_needs(tmp_path: Path) -> None:
    trainer = trl.SFTTrainer(
        model=tiny(vocab_size=100), args=trl.SFTConfig(str(tmp_path), use_cpu=True, report_to="none", bf16=False),
        train_dataset=chats(), processing_class=tokenizer(),
    )  # fmt: skip
    apply(trainer.model)
    with pytest.raises(UnsupportedForward, match="apply_to_trainer"):
        trainer.train()


def test_apply_before_the_trainer_is_made_is_refused(tmp_path: Path) -> None:
    model = tiny(vocab_size=100)
    apply(model, label_smoothing=0.1)
    trainer = trl.SFTTrainer(
        model=model, args=trl.SFTConfig(str(tmp_path), use_cpu=True, report_to="none", bf16=False),
        train_dataset=chats(), processing_class=tokenizer(),
    )  # fmt: skip
    with pytest.raises(ValueError, match="came before the SFTTrainer was made"):
        apply_to_trainer(trainer)
