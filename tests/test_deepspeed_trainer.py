"""Trainers that make the DeepSpeed engine themselves, accelerate's and those of Hugging Face, with the section: losses
and gradient norms of every step are those of the stock loss."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit.skips import needs

pytest.importorskip("transformers", reason=needs("hf"))
pytest.importorskip("accelerate", reason=needs("hf"))
pytest.importorskip("deepspeed", reason=needs("deepspeed"))

import accelerate
import transformers

from flce_dist.integrations.deepspeed import (
    SectionWarning,
    attach_to_accelerator,
    attach_to_trainer,
    full_head,
    shard_head_by_section,
)
from flce_dist.integrations.transformers import apply_to_trainer
from tests.kit.causal_lm import tiny
from tests.kit.engines import deepspeed_ready
from tests.kit.workers import Context, Pool
from tests.test_hf_trainer import STEPS, assert_same_history, examples, history

Engines = Callable[[int], Pool]
DATA = {"vocab_parallel": "data"}


@dataclass(frozen=True)
class Run:
    """One Trainer: its DeepSpeed configuration, and what the user does beside it."""

    stage: int = 2
    section: dict[str, Any] | None = field(default_factory=dict)
    """None: the stock loss."""
    accumulation: int = 2
    config: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    folder: str = ""
    """Of a pretrained model, which is then loaded under `zero.Init`."""

    @property
    def id(self) -> str:
        parts = [f"zero{self.stage}", f"acc{self.accumulation}", *map(str, (self.section or {}).values())]
        return "-".join([*parts, *self.config, *self.arguments])

    def deepspeed_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": self.stage, "stage3_gather_16bit_weights_on_model_save": True},
            **self.config,
        }
        if self.stage == 3:
            config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        if self.section is not None:
            config["flce_dist"] = self.section
        return config


@contextlib.contextmanager
def hugging_face_ready(ctx: Context) -> Iterator[None]:
    """accelerate and DeepSpeed; their globals are as new afterwards. For several processes without a GPU accelerate
    1.15 chooses no backend where DeepSpeed is asked for, and transformers 5.24 no bf16; here they are told."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    with deepspeed_ready(ctx), pytest.MonkeyPatch.context() as patch:
        # accelerate writes more of them, and MonkeyPatch takes back only what it has set itself.
        before = dict(os.environ)
        patch.setattr(PartialState, "_prepare_backend", lambda *_, **__: ("gloo", DistributedType.MULTI_CPU))
        patch.setattr(transformers.training_args, "is_torch_bf16_gpu_available", lambda: True)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", LOCAL_WORLD_SIZE=str(ctx.world))
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
            unset_hf_deepspeed_config()
            os.environ.clear()
            os.environ.update(before)


def trainer_of(run: Run, folder: str) -> Any:
    arguments = {
        "output_dir": folder,
        "report_to": "none",
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 4 // run.accumulation,
        "gradient_accumulation_steps": run.accumulation,
        "save_strategy": "no",
        "disable_tqdm": True,
        "deepspeed": run.deepspeed_config(),
        **run.arguments,
    }
    args = transformers.TrainingArguments(**arguments)  # before the model, for zero.Init
    if run.folder:
        model = transformers.AutoModelForCausalLM.from_pretrained(run.folder)
    else:
        model = tiny(num_key_value_heads=4)
    return transformers.Trainer(model=model, args=args, train_dataset=examples(24), eval_dataset=examples(8))


History = list[tuple[float, float]]


def _train(ctx: Context, run: Run, folder: str) -> tuple[History, float]:
    with hugging_face_ready(ctx):
        trainer = trainer_of(run, folder)
        if run.section is not None:
            attach_to_trainer(trainer)
        trainer.train()
        model = trainer.deepspeed.module
        assert hasattr(model.lm_head, "_flce_loss") == (run.section is not None)
        loss = trainer.evaluate()["eval_loss"]
        trainer.deepspeed.destroy()
        return history(trainer), loss


class TestTheTrainer:
    """`TrainingArguments(deepspeed=...)`, then one line."""

    @pytest.mark.parametrize(
        "run",
        [
            Run(2, accumulation=1),
            Run(2, accumulation=4),
            Run(3, accumulation=4),
            Run(3, DATA, accumulation=4),
            Run(3, DATA, arguments={"bf16": True, "max_grad_norm": 0.1}),
            *(
                pytest.param(run, marks=pytest.mark.exhaustive)
                for run in (
                    Run(3, accumulation=1),
                    Run(2, arguments={"bf16": True}),
                    Run(2, arguments={"average_tokens_across_devices": False}),
                    Run(3, arguments={"max_grad_norm": 0.1}),
                    Run(3, DATA, arguments={"max_grad_norm": 0.1}),
                )
            ),
        ],
        ids=lambda run: run.id,
    )
    def test_steps_are_those_of_the_stock_loss(self, run: Run, engine_workers: Engines, tmp_path: Path) -> None:
        """The examples have different numbers of labels, so that a wrong `num_items_in_batch` shows."""
        stock = Run(run.stage, None, run.accumulation, run.config, run.arguments)
        expected, evaluated = engine_workers(2).run(2, _train, stock, str(tmp_path))[0]
        for found, loss in engine_workers(2).run(2, _train, run, str(tmp_path)):
            if run.arguments.get("bf16"):
                torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-2, atol=1e-3)
            else:
                assert_same_history(found, expected)
            assert loss == pytest.approx(evaluated, rel=2e-2 if run.arguments.get("bf16") else 1e-5)

    def test_a_pretrained_model_whose_head_is_never_gathered_is_saved_whole_and_resumes(
        self, engine_workers: Engines, tmp_path: Path
    ) -> None:
        """`from_pretrained` partitions parameters as it loads them, so the head is sharded out of its partitions."""
        tiny(num_key_value_heads=4).save_pretrained(tmp_path / "pretrained")
        run = Run(3, DATA, folder=str(tmp_path / "pretrained"), arguments={"save_strategy": "steps", "save_steps": 2})
        straight, resumed, head = engine_workers(2).run(2, _saved_and_resumed, run, str(tmp_path))[0]
        assert_same_history(straight, engine_workers(2).run(2, _train, Run(3, None), str(tmp_path))[0][0])
        assert resumed[-1] == straight[-1]
        saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        assert torch.equal(saved.lm_head.weight, head)

    @pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
    def test_autotp_shards_the_head(self, stage: int, engine_workers: Engines, tmp_path: Path) -> None:
        """The engine replaces the head, and is given the loss behind that."""
        config = {"tensor_parallel": {"autotp_size": 2}}
        expected = engine_workers(2).run(2, _train, Run(stage, None, config=config), str(tmp_path))
        found = engine_workers(2).run(2, _train, Run(stage, {"vocab_parallel": "tensor"}, config=config), str(tmp_path))
        for (ours, loss), (stock, evaluated) in zip(found, expected, strict=True):
            assert_same_history(ours, stock)
            assert loss == pytest.approx(evaluated, rel=1e-5)

    def test_what_needs_logits_and_a_wrong_section_are_refused_before_the_first_step(
        self, engine_workers: Engines, tmp_path: Path
    ) -> None:
        engine_workers(2).run(2, _refused, str(tmp_path))


def _saved_and_resumed(ctx: Context, run: Run, folder: str) -> tuple[History, History, torch.Tensor]:
    histories = []
    for resume in (None, f"{folder}/checkpoint-2"):
        with hugging_face_ready(ctx):
            trainer = trainer_of(run, folder)
            assert hasattr(trainer.model.lm_head.weight, "ds_id")
            attach_to_trainer(trainer)
            assert trainer.model.lm_head.weight.shape == (51, 32)
            trainer.train(resume_from_checkpoint=resume)
            histories.append(history(trainer))
            if resume is None:
                trainer.save_model(f"{folder}/model")
                head = full_head(trainer.deepspeed)["lm_head.weight"]
            trainer.deepspeed.destroy()
    return histories[0], histories[1], head


def _refused(ctx: Context, folder: str) -> None:
    with hugging_face_ready(ctx):
        with pytest.raises(ValueError, match=r"flce_dist\.z_los: unknown key; did you mean 'z_loss'"):
            attach_to_trainer(trainer_of(Run(2, {"z_los": 0.1}), folder))
        with pytest.raises(ValueError, match=r"label_smoothing=0\.1"):
            attach_to_trainer(trainer_of(Run(2, arguments={"label_smoothing_factor": 0.1}), folder))
        local = {"average_tokens_across_devices": False}
        with pytest.raises(ValueError, match="divides by each rank's own tokens"):
            attach_to_trainer(trainer_of(Run(3, DATA, arguments=local), folder))
        with pytest.raises(ValueError, match=r"flce_dist\.vocab_parallel: .*stage 3, got 2"):
            attach_to_trainer(trainer_of(Run(2, DATA), folder))
        alias = Run(2, None, config={"loss": {"type": "flce_dist", "z_loss": 0.1}})
        for run, name in ((Run(2), "flce_dist"), (alias, "loss")):
            with pytest.raises(ValueError, match=rf'the loss in its section "{name}", .*attach_to_trainer\(trainer\)'):
                apply_to_trainer(trainer_of(run, folder))
        with pytest.warns(SectionWarning, match="no section"):
            attach_to_trainer(trainer_of(Run(2, None), folder))


def _sft(ctx: Context, run: Run, folder: str) -> list[dict[str, float]]:
    import trl

    from tests.test_hf_sft import NAMES, chats, tokenizer

    with hugging_face_ready(ctx):
        config = run.deepspeed_config()
        arguments = {"output_dir": folder, "report_to": "none", "max_steps": STEPS, "logging_steps": 1, "bf16": False}
        arguments |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_length": 32}
        arguments |= {"learning_rate": 1e-2, "save_strategy": "no", "disable_tqdm": True, "deepspeed": config}
        model = tiny(vocab_size=100, num_key_value_heads=4)
        args = trl.SFTConfig(gradient_checkpointing=False, **arguments)
        trainer = trl.SFTTrainer(model=model, args=args, train_dataset=chats(), processing_class=tokenizer())
        if run.section is not None:
            plugin = trainer.accelerator.state.deepspeed_plugin
            plugin.deepspeed_config["flce_dist"] = {"vocab_parallel": "tensor"}
            with pytest.raises(
                ValueError, match=r"^flce_dist\.vocab_parallel: a SFTTrainer computes its loss from a whole"
            ):
                attach_to_trainer(trainer)
            plugin.deepspeed_config["flce_dist"] = {"head": "model.embed_tokens"}
            with pytest.raises(ValueError, match=r"^flce_dist\.head: a SFTTrainer uses the model's output embeddings"):
                attach_to_trainer(trainer)
            plugin.deepspeed_config["flce_dist"] = run.section
            attach_to_trainer(trainer)
            assert hasattr(trainer.model.lm_head, "_flce_loss")
        trainer.train()
        trainer.deepspeed.destroy()
        return [{name: entry[name] for name in NAMES} for entry in trainer.state.log_history if "grad_norm" in entry]


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_an_sft_trainer(stage: int, engine_workers: Engines, tmp_path: Path) -> None:
    """Its loss, gradient norm and metrics are those of its own fused head."""
    pytest.importorskip("trl", reason=needs("hf"))
    expected = engine_workers(2).run(2, _sft, Run(stage, None), str(tmp_path))[0]
    found = engine_workers(2).run(2, _sft, Run(stage), str(tmp_path))[0]
    assert len(found) == len(expected) == STEPS
    for ours, stock in zip(found, expected, strict=True):
        assert ours == pytest.approx(stock, rel=1e-4)


def _accelerate(ctx: Context, run: Run) -> list[float]:
    """Losses of the whole batch in each step of a loop that the user writes with an `Accelerator`."""
    with hugging_face_ready(ctx):
        config = run.deepspeed_config() | {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.1}
        del config["bf16"]
        plugin = accelerate.DeepSpeedPlugin(hf_ds_config=config)
        accelerator = accelerate.Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=run.accumulation)
        if run.section is not None:
            attach_to_accelerator(accelerator)
        model = tiny(num_key_value_heads=4)
        shard_head_by_section(model, config)  # does nothing unless the section says so
        optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
        data = examples(4) * 6
        for example in data:
            example["labels"] = example["input_ids"]  # the mean of ranks' means is that of all tokens
        loader = torch.utils.data.DataLoader(data, batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
        model.destroy()
        return losses


@pytest.mark.parametrize("run", [Run(2), Run(3), Run(3, DATA), Run(0)], ids=lambda run: run.id)
def test_an_accelerators_plugin(run: Run, engine_workers: Engines) -> None:
    expected = engine_workers(2).run(2, _accelerate, Run(run.stage, None, run.accumulation))[0]
    assert expected[0] > expected[-1] + 0.01
    for found in engine_workers(2).run(2, _accelerate, run):
        assert found == pytest.approx(expected, rel=1e-5)


def _without_plugin(ctx: Context) -> None:
    with hugging_face_ready(ctx), pytest.raises(TypeError, match="no DeepSpeed plugin"):
        attach_to_accelerator(accelerate.Accelerator(cpu=True))


def test_an_accelerator_without_a_plugin_is_refused(engine_workers: Engines) -> None:
    engine_workers(2).run(2, _without_plugin)
