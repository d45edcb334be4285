"""apply() under DDP, FSDP1, FSDP2 and two dimensions, and a Trainer on data-parallel ranks, beside stock."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from tests.kit.skips import needs
from tests.kit.workers import Context, Pool
from tests.test_checks_ranks import assert_all_raise

transformers = pytest.importorskip("transformers", reason=needs("hf"))

from flce_dist.integrations.never_gathered import shard_head  # noqa: E402
from flce_dist.integrations.transformers import apply, apply_to_trainer  # noqa: E402
from tests.kit.causal_lm import LABELS, TEXT, load_sharded, tiny, whole  # noqa: E402

STEPS = 2
TRAINER_TIMEOUT_S = 240.0  # the first one imports all that it needs


def _wrap(ctx: Context, model: Any, how: str, early: bool) -> tuple[Any, Any]:
    """The wrapped model and what is called; `apply` comes before or behind the wrapping."""
    if early:
        apply(model)
    if how == "ddp":
        wrapped = DistributedDataParallel(model, process_group=ctx.group)
    elif how.startswith("fsdp1"):
        policy = ModuleWrapPolicy({torch.nn.Linear}) if how == "fsdp1 own unit" else None
        wrapped = FullyShardedDataParallel(
            model, process_group=ctx.group, auto_wrap_policy=policy, use_orig_params=True,
            device_id=torch.device("cpu"),
        )  # fmt: skip
    else:
        mesh = ctx.mesh(4, names=("data",))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        if how == "fsdp2 own unit":
            fully_shard(model.lm_head, mesh=mesh)
        elif how == "fsdp2 tail":
            fully_shard([model.model.norm, model.lm_head], mesh=mesh, reshard_after_forward=False)
        wrapped = fully_shard(model, mesh=mesh)
    if not early:
        apply(model)
    return wrapped, model


def _train(ctx: Context, how: str, early: bool, kind: str) -> dict[str, Tensor]:
    """Parameters after two steps of which each rank sees another half row."""
    model = tiny(kind, **({"head_dim": 8} if kind == "Gemma2" else {}), tie_word_embeddings=False)
    wrapped, model = _wrap(ctx, model, how, early)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    rows = slice(ctx.rank % 2, ctx.rank % 2 + 1)
    for _ in range(STEPS):
        count = (LABELS[:, 1:] != -100).sum()
        # Each row is on two ranks; like the Trainer: over all tokens, times the number of ranks.
        loss = wrapped(input_ids=TEXT[rows], labels=LABELS[rows], num_items_in_batch=2 * count).loss * ctx.world
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if how.startswith("fsdp1"):
        with FullyShardedDataParallel.summon_full_params(wrapped):
            return {name.replace("_fsdp_wrapped_module.", ""): p.clone() for name, p in model.named_parameters()}
    return {name: whole(p.detach()) for name, p in model.named_parameters()}


def _stock(kind: str) -> dict[str, Tensor]:
    model = tiny(kind, **({"head_dim": 8} if kind == "Gemma2" else {}), tie_word_embeddings=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(STEPS):
        model(input_ids=TEXT, labels=LABELS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("how", "early", "kind"),
    [
        ("ddp", True, "Llama"),
        ("ddp", False, "Gemma2"),
        ("fsdp1", True, "Gemma2"),
        ("fsdp1", False, "Llama"),
        ("fsdp1 own unit", False, "Llama"),
        ("fsdp2 root", True, "Llama"),
        ("fsdp2 own unit", True, "Gemma2"),
        ("fsdp2 own unit", False, "Llama"),
        ("fsdp2 tail", False, "Gemma2"),
    ],
)
def test_parameters_after_steps_are_those_of_one_process(how: str, early: bool, kind: str, workers: Pool) -> None:
    expected = _stock(kind)
    for parameters in workers.run(4, _train, how, early, kind):
        assert parameters.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def _sharded_behind_fsdp1(ctx: Context, use_orig_params: bool) -> None:
    model = tiny()
    FullyShardedDataParallel(
        model, process_group=ctx.group, use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )
    apply(model, ctx.group)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_head_that_fsdp1_has_sharded_is_not_cut(use_orig_params: bool, workers: Pool) -> None:
    assert_all_raise(workers.outcomes(2, _sharded_behind_fsdp1, use_orig_params), "ValueError", "FSDP")


def _counts(ctx: Context) -> None:
    model = tiny()
    fully_shard(model, mesh=ctx.mesh(4, names=("data",)), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    apply(model)
    exact = model(input_ids=TEXT, labels=LABELS, num_items_in_batch=torch.tensor(1001)).loss
    assert model(input_ids=TEXT, labels=LABELS, num_items_in_batch=1001).loss == exact
    with pytest.raises(ValueError, match="cannot count tokens"):
        model(input_ids=TEXT, labels=LABELS, num_items_in_batch=torch.tensor(1001.0))


def test_a_count_that_mixed_precision_rounds_is_refused(workers: Pool) -> None:
    workers.run(4, _counts)


@contextmanager
def _as_launched(ctx: Context, sharded: bool = False) -> Iterator[None]:
    """The environment of a launcher, which accelerate reads; the group of the session's workers is there already.
    accelerate shards models on accelerators only: with `sharded` it takes the CPU for one."""
    from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState

    values = {"RANK": ctx.rank, "LOCAL_RANK": ctx.rank, "WORLD_SIZE": ctx.world, "LOCAL_WORLD_SIZE": ctx.world}
    others = {name: value for name, value in os.environ.items() if name.startswith(("ACCELERATE_", "FSDP_"))}
    os.environ |= {name: str(value) for name, value in values.items()} | {"ACCELERATE_USE_CPU": "true"}
    plain = PartialState.__init__

    def on_an_accelerator(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        self.distributed_type = DistributedType.MULTI_GPU

    if sharded:
        PartialState.__init__ = on_an_accelerator
    try:
        yield
    finally:
        PartialState.__init__ = plain
        for name in [name for name in os.environ if name in values or name.startswith(("ACCELERATE_", "FSDP_"))]:
            del os.environ[name]
        os.environ |= others
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


def _trainer(ctx: Context, how: str) -> Any:
    from tests.test_hf_trainer import history, trainer

    fsdp = {"fsdp": True, "fsdp_config": {"version": 2}} if "fsdp2" in how else {}
    with _as_launched(ctx, bool(fsdp)), tempfile.TemporaryDirectory() as folder:
        run = trainer(
            Path(folder), per_device_train_batch_size=1, gradient_accumulation_steps=2, ddp_backend="gloo",
            max_grad_norm=0.0, per_device_eval_batch_size=2, **fsdp,
        )  # fmt: skip
        run.eval_dataset = run.train_dataset[:8]
        if "never gathered" in how:
            head = shard_head(run.model, "lm_head", ctx.mesh(4, names=("data",)))
            if fsdp:
                run.accelerator.state.fsdp_plugin.ignored_modules = [head]
        if how != "stock":
            apply_to_trainer(run)
        run.train()
        evaluation = run.evaluate()["eval_loss"]
        assert run.accelerator.num_processes == ctx.world
        assert isinstance(run.model, FSDPModule) == bool(fsdp)
        dist.barrier()
        losses = [loss for loss, _ in history(run)]
        return [*losses, evaluation], {name: whole(p.detach()) for name, p in run.model.named_parameters()}


@pytest.fixture(scope="module")
def stock_on_ranks(workers: Pool) -> Any:
    pytest.importorskip("accelerate", reason=needs("hf"))
    return workers.run(4, _trainer, "stock", timeout=TRAINER_TIMEOUT_S)[0]


@pytest.mark.parametrize("how", ["ddp", "never gathered", "fsdp2", "never gathered beside fsdp2"])
def test_a_trainer_on_four_ranks(how: str, stock_on_ranks: Any, workers: Pool) -> None:
    """It counts the tokens of all ranks and multiplies each rank's loss by their number: right for a head that is
    averaged like the body, and not to reach the shards of one that is not."""
    losses, parameters = stock_on_ranks
    for ours, ours_parameters in workers.run(4, _trainer, how, timeout=TRAINER_TIMEOUT_S):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(losses), rtol=1e-4, atol=1e-5)
        for name, value in parameters.items():
            torch.testing.assert_close(ours_parameters[name], value, rtol=1e-3, atol=1e-4)


def _own_counts(ctx: Context) -> None:
    from tests.test_hf_trainer import trainer

    with _as_launched(ctx), tempfile.TemporaryDirectory() as folder:
        run = trainer(Path(folder), ddp_backend="gloo", average_tokens_across_devices=False)
        shard_head(run.model, "lm_head", ctx.mesh(4, names=("data",)))
        with pytest.raises(ValueError, match="divides by each rank's own tokens"):
            apply_to_trainer(run)


def test_counts_of_each_rank_are_refused_for_a_head_that_ranks_share(workers: Pool) -> None:
    pytest.importorskip("accelerate", reason=needs("hf"))
    workers.run(4, _own_counts, timeout=TRAINER_TIMEOUT_S)


def _trainer_of_a_sharded_model(ctx: Context, folder: str, sizes: dict[str, int]) -> Any:
    from tests.test_hf_trainer import history, trainer

    with _as_launched(ctx, sharded=True), tempfile.TemporaryDirectory() as out:
        batch = 2 // sizes.get("fsdp_size", 1)
        run = trainer(
            Path(out), load_sharded(folder, sizes), per_device_train_batch_size=batch, ddp_backend="gloo",
            max_grad_norm=0.0,
        )  # fmt: skip
        handle = apply_to_trainer(run)
        run.train()
        assert handle.output is not None
        return history(run), {name: whole(p.detach()) for name, p in run.model.named_parameters()}


@pytest.mark.parametrize("sizes", [{"tp_size": 4}, {"tp_size": 2, "fsdp_size": 2}], ids=str)
def test_a_trainer_with_transformers_own_tensor_parallelism(sizes: dict[str, int], workers: Pool) -> None:
    """Step by step beside the stock Trainer in one process."""
    pytest.importorskip("accelerate", reason=needs("hf"))
    from tests.test_hf_trainer import assert_same_history, history, trainer

    with tempfile.TemporaryDirectory() as folder:
        model = tiny(num_key_value_heads=4)
        model.save_pretrained(folder)
        stock = trainer(Path(folder) / "run", model, per_device_train_batch_size=2, max_grad_norm=0.0)
        stock.train()
        results = workers.run(4, _trainer_of_a_sharded_model, folder, sizes, timeout=TRAINER_TIMEOUT_S)
    for ours, parameters in results:
        assert_same_history(ours, history(stock))
        for name, value in stock.model.named_parameters():
            torch.testing.assert_close(parameters[name], value.detach(), rtol=1e-3, atol=1e-4)
