"""A Trainer, accelerate and PEFT with the fused loss, step by step beside stock (field report B37)."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.kit.skips import needs

transformers = pytest.importorskip("transformers", reason=needs("hf"))
pytest.importorskip("accelerate", reason=needs("hf"))

from flce_dist.integrations.transformers import UnsupportedForward, apply, apply_to_trainer  # noqa: E402
from tests.kit.causal_lm import LABELS, TEXT, VOCAB, assert_same, loss_and_grads, tiny  # noqa: E402

STEPS = 3


def examples(count: int = 12, length: int = 10) -> list[dict[str, Any]]:
    """Texts of equal length, of which another part is ignored in each."""
    ids = torch.randint(3, VOCAB, (count, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    for row in range(count):
        labels[row, : row % (length - 1)] = -100
    return [
        {"input_ids": i, "labels": t, "attention_mask": torch.ones_like(i)} for i, t in zip(ids, labels, strict=True)
    ]


def arguments(folder: Path, **values: Any) -> Any:
    return transformers.TrainingArguments(
        **{
            "output_dir": str(folder),
            "use_cpu": True,
            "report_to": "none",
            "max_steps": STEPS,
            "logging_steps": 1,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "per_device_train_batch_size": 4,
            "save_strategy": "no",
            "disable_tqdm": True,
            **values,
        }
    )


def trainer(folder: Path, model: Any = None, **values: Any) -> Any:
    kinds = ("compute_metrics", "preprocess_logits_for_metrics", "compute_loss_func", "callbacks")
    extra = {name: values.pop(name) for name in kinds if name in values}
    data = examples()
    return transformers.Trainer(
        model=model or tiny(), args=arguments(folder, **values), train_dataset=data, eval_dataset=data[:5], **extra
    )


def history(done: Any) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    return [(entry["loss"], entry["grad_norm"]) for entry in done.state.log_history if "grad_norm" in entry]


def assert_same_history(got: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    assert len(got) == len(expected) > 0
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Any:
    done = trainer(tmp_path_factory.mktemp("stock"))
    done.train()
    return done


def test_a_compiled_model_is_compiled_once(stock: Any, tmp_path: Path) -> None:
    torch.compiler.reset()  # graphs of other tests' models are of the same code
    ours = trainer(tmp_path, torch_compile=True, torch_compile_backend="aot_eager")
    apply_to_trainer(ours)
    with torch._dynamo.config.patch(error_on_recompile=True):
        ours.train()
    assert_same_history(history(ours), history(stock))


@pytest.mark.parametrize("accumulation", [1, 4])
def test_steps_are_those_of_stock_whatever_the_accumulation(accumulation: int, stock: Any, tmp_path: Path) -> None:
    """4 x 1 and 1 x 4 sequences: num_items_in_batch makes them one mean."""
    ours = trainer(tmp_path, per_device_train_batch_size=4 // accumulation, gradient_accumulation_steps=accumulation)
    handle = apply_to_trainer(ours)
    ours.train()
    assert handle.output is not None  # the fused loss was the one that was used
    assert_same_history(history(ours), history(stock))
    assert ours.evaluate()["eval_loss"] == pytest.approx(stock.evaluate()["eval_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("Mixtral", {"bf16": True}),
        ("Gemma2", {"gradient_checkpointing": True, "average_tokens_across_devices": False}),
        ("Qwen2", {"packed": True}),
    ],
    ids=["bf16 and experts", "checkpointing", "packed documents"],
)
def test_variants_are_those_of_stock(kind: str, values: dict[str, Any], tmp_path: Path) -> None:
    packed = values.pop("packed", False)
    results = []
    for fused in (False, True):
        model = tiny(kind, **({"head_dim": 8} if kind == "Gemma2" else {"output_router_logits": kind == "Mixtral"}))
        run = trainer(tmp_path, model, **values)
        if packed:
            for row in run.train_dataset:
                row.pop("attention_mask")
                row["position_ids"] = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4])
                row["labels"][5] = -100  # the first token of the second document
        if fused:
            apply(run.model)
        run.train()
        results.append(history(run))
    if values.get("bf16"):
        torch.testing.assert_close(torch.tensor(results[1]), torch.tensor(results[0]), rtol=2e-2, atol=1e-3)
    else:
        assert_same_history(results[1], results[0])


def test_checkpoints_are_unchanged_and_training_resumes(tmp_path: Path) -> None:
    runs = {}
    for name in ("stock", "ours"):
        runs[name] = trainer(tmp_path / name, save_strategy="steps", save_steps=1, max_steps=2)
        if name == "ours":
            apply_to_trainer(runs[name])
        runs[name].train()
    weights = [
        {p.relative_to(tmp_path / name): p for p in sorted((tmp_path / name).rglob("*")) if p.is_file()}
        for name in runs
    ]
    assert weights[0].keys() == weights[1].keys()
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours" / "checkpoint-2")
    for (name, ours), (other, theirs) in zip(
        reloaded.state_dict().items(), runs["stock"].model.state_dict().items(), strict=True
    ):
        assert name == other
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    resumed = trainer(tmp_path / "ours", save_strategy="no")
    apply_to_trainer(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-1"))
    straight = trainer(tmp_path / "straight")
    straight.train()
    assert_same_history(history(resumed)[-2:], history(straight)[-2:])


def _metrics(prediction: Any) -> dict[str, float]:
    hit = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    return {"accuracy": hit[prediction.label_ids[:, 1:] != -100].mean()}


def test_metrics_that_need_logits(stock: Any, tmp_path: Path) -> None:
    run = trainer(tmp_path, copy.deepcopy(stock.model), compute_metrics=_metrics)
    expected = run.evaluate()
    with pytest.raises(ValueError, match="eval_logits=True"):
        apply_to_trainer(run)
    handle = apply_to_trainer(run, eval_logits=True)
    assert run.evaluate()["eval_accuracy"] == expected["eval_accuracy"]
    handle.remove()
    apply(run.model)  # without the trainer's settings it is found in the evaluation
    with pytest.raises(TypeError, match="eval_logits=True"):
        run.evaluate()


def test_accuracy_without_logits(stock: Any, tmp_path: Path) -> None:
    run = trainer(tmp_path, copy.deepcopy(stock.model), compute_metrics=_metrics, per_device_eval_batch_size=5)
    expected = run.evaluate()
    run.compute_metrics = None
    handle = apply_to_trainer(run, aux=("accuracy",))
    run.evaluate()
    assert handle.output.accuracy.item() == pytest.approx(expected["eval_accuracy"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing=0.1"),
        ({"use_liger_kernel": True}, "use_liger_kernel"),
        ({"compute_loss_func": lambda outputs, labels, num_items_in_batch: 0}, "compute_loss_func"),
        ({"preprocess_logits_for_metrics": lambda logits, labels: logits}, "eval_logits"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_need_logits_are_refused_with_a_way_out(
    values: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    liger = values.pop("use_liger_kernel", False)
    run = trainer(tmp_path, **values)
    run.args.use_liger_kernel = liger
    with pytest.raises(ValueError, match=message):
        apply_to_trainer(run)


def test_other_set_ups_that_are_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    with pytest.raises(TypeError, match="takes no group"):
        apply_to_trainer(run, group=None)
    run.args._n_gpu = 2
    with pytest.raises(ValueError, match="one process a GPU"):
        apply_to_trainer(run)
    run = transformers.Trainer(model_init=lambda: tiny(), args=arguments(tmp_path), train_dataset=examples())
    with pytest.raises(ValueError, match="model_init makes a new model"):
        apply_to_trainer(run)


class _OwnLoss(transformers.Trainer):  # type: ignore[name-defined, misc]
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class _AsksTheModel(transformers.Trainer):  # type: ignore[name-defined, misc]
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return model(**inputs).loss


def test_a_loss_that_the_trainer_makes_of_logits_is_noticed(tmp_path: Path) -> None:
    own = _OwnLoss(model=tiny(), args=arguments(tmp_path / "own"), train_dataset=examples())
    handle = apply_to_trainer(own, z_loss=1.0)
    with pytest.raises(UnsupportedForward, match="_OwnLoss computed a loss of its own"):
        own.train()
    handle.remove()
    assert "training_step" not in vars(own)
    asking = _AsksTheModel(model=tiny(), args=arguments(tmp_path / "asking"), train_dataset=examples())
    apply_to_trainer(asking)
    asking.train()


def test_label_smoothing_is_an_option_here(tmp_path: Path) -> None:
    run = trainer(tmp_path / "stock", label_smoothing_factor=0.1)
    run.train()
    ours = trainer(tmp_path / "ours")
    apply_to_trainer(ours, label_smoothing=0.1)
    ours.train()
    assert_same_history(history(ours), history(run))


def test_accelerate(tmp_path: Path) -> None:
    """A loop of one's own, with the loss's own mean and gradient accumulation."""
    from accelerate import Accelerator

    results = []
    for fused in (False, True):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = tiny()
        if fused:
            apply(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(examples(), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        results.append(losses)
        unwrapped = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        assert "no logits were made" in repr(unwrapped(TEXT, labels=LABELS).logits) or not fused
    torch.testing.assert_close(torch.tensor(results[1]), torch.tensor(results[0]), rtol=1e-5, atol=1e-6)


class TestPeft:
    """LoRA and DoRA on the body; a head that is trained beside them, and one with an adapter."""

    peft = pytest.importorskip("peft", reason=needs("hf"))

    def wrap(self, model: Any, **values: Any) -> Any:
        torch.manual_seed(0)
        config = self.peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **values)
        return self.peft.get_peft_model(model, config)

    @pytest.mark.parametrize("order", ["apply last", "apply first"])
    @pytest.mark.parametrize("values", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}], ids=str)
    def test_adapters_on_the_body(self, values: dict[str, Any], order: str) -> None:
        expected = loss_and_grads(self.wrap(tiny(), **values))
        model = tiny()
        if order == "apply first":
            handle = apply(model)
        wrapped = self.wrap(model, **values)
        if order == "apply last":
            handle = apply(wrapped)
        result = loss_and_grads(wrapped)
        assert_same(result, expected)
        assert any("lm_head" in name for name in result[1]) == ("modules_to_save" in values)
        logits = wrapped(input_ids=TEXT, labels=LABELS).logits
        assert "no logits were made" in repr(logits)
        handle.remove()
        assert_same(loss_and_grads(wrapped), expected)
        apply(wrapped)
        assert "no logits were made" in repr(wrapped(input_ids=TEXT, labels=LABELS).logits)

    def test_a_saved_head_and_its_original(self) -> None:
        wrapped = self.wrap(tiny(), modules_to_save=["lm_head"])
        with torch.no_grad():
            wrapped.base_model.model.lm_head.modules_to_save["default"].weight.mul_(2)
        with wrapped.disable_adapter():
            expected = wrapped(input_ids=TEXT, labels=LABELS).loss
        apply(wrapped)
        with wrapped.disable_adapter():
            torch.testing.assert_close(wrapped(input_ids=TEXT, labels=LABELS).loss, expected)
        assert (wrapped(input_ids=TEXT, labels=LABELS).loss - expected).abs() > 1e-3

    @pytest.mark.parametrize(
        "values",
        [{"target_modules": ["lm_head"]}, {"trainable_token_indices": {"embed_tokens": [3]}}],
        ids=["lora", "trainable tokens"],
    )
    def test_an_adapter_on_the_head_is_refused(self, values: dict[str, Any]) -> None:
        wrapped = self.peft.get_peft_model(tiny(tie_word_embeddings=True), self.peft.LoraConfig(r=2, **values))
        with pytest.raises(TypeError, match="adapter"):
            apply(wrapped)

    def test_an_adapter_that_comes_later_is_refused(self) -> None:
        model = tiny()
        apply(model)
        wrapped = self.peft.get_peft_model(model, self.peft.LoraConfig(r=2, target_modules=["lm_head"]))
        with pytest.raises(UnsupportedForward, match="an adapter on its head"):
            wrapped(input_ids=TEXT, labels=LABELS)

    def test_a_trainer(self, tmp_path: Path) -> None:
        results = []
        for fused in (False, True):
            run = trainer(tmp_path, self.wrap(tiny(), modules_to_save=["lm_head"]))
            if fused:
                apply_to_trainer(run)
            run.train()
            results.append(history(run))
        assert_same_history(results[1], results[0])


def test_memory_and_speed_do_not_depend_on_logits(tmp_path: Path) -> None:
    """The largest tensor of a step is no [tokens, vocabulary] one."""
    model = tiny(vocab_size=2048)
    ids = torch.randint(2048, (4, 64))
    apply(model, chunk_rows=16)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    with Watch():
        model(input_ids=ids, labels=ids).loss.backward()
    assert largest <= max(p.numel() for p in model.parameters()) < ids.numel() * 2048
    assert isinstance(model.lm_head, nn.Linear)
