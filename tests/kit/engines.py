"""Real DeepSpeed engines in the workers: one configuration is a `Cell`, and a single process trains the reference.

DeepSpeed keeps process groups and counters in globals, so engines have pools of their own (`engine_workers`), whose
default group has exactly the ranks of the run; what would disturb the next engine is released after each.
"""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.kit.workers import Context

H, ROWS, LENGTH, STEPS, LR = 16, 2, 6, 3, 0.5


@dataclass(frozen=True)
class Cell:
    """One engine: its ZeRO stage and what varies around it."""

    stage: int = 0
    dtype: str = "float32"
    accumulation: int = 1
    clip: float = 0.0
    tied: bool = False
    bias: bool = False
    vocab_size: int = 37
    mpu: bool = False
    zero_init: bool = False
    llama: bool = False
    """A model of transformers, called with labels, instead of `TinyModel`."""
    normalized: bool = False
    """Divide by `step_normalizer`, and let `engine.backward` divide nothing."""
    section: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        parts = [f"zero{self.stage}", self.dtype, f"acc{self.accumulation}", f"clip{self.clip:g}"]
        parts += (
            ["llama"] * self.llama
            + ["tied"] * self.tied
            + ["bias"] * self.bias
            + ["mpu"] * self.mpu
            + ["zero.Init"] * self.zero_init
            + ["normalized"] * self.normalized
        )
        parts += [f"{key}={value}" for key, value in self.section.items()]
        return "-".join([*parts, *self.zero, *self.extra])

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "zero_optimization": {"stage": self.stage, **self.zero},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "flce_dist": self.section,
            **self.extra,
        }
        if self.stage == 3:
            config["zero_optimization"].setdefault("stage3_param_persistence_threshold", 0)
        if self.dtype == "bfloat16":
            config["bf16"] = {"enabled": True}
        if self.dtype == "float16":
            # Without ZeRO, DeepSpeed 0.19.8 divides the gradients by a loss scale that it has not applied.
            config["fp16"] = {"enabled": True, "loss_scale": 256 if self.stage else 1}
        return config


class TinyModel(nn.Module):
    """An embedding, a body and a head that is called with the labels, as a user's own model may."""

    def __init__(self, vocab_size: int, tied: bool = False, bias: bool = False):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, H)
        self.body = nn.Linear(H, H)
        self.norm = nn.LayerNorm(H)
        self.lm_head = nn.Linear(H, vocab_size, bias=bias)
        if tied:
            self.lm_head.weight = self.embed.weight

    def hidden(self, ids: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.body(self.embed(ids))))

    def forward(self, ids: Tensor, labels: Tensor, **arguments: Any) -> Any:
        return self.lm_head(self.hidden(ids), labels, **arguments)


def make_model(cell: Cell) -> Any:
    if cell.llama:
        from tests.kit.causal_lm import tiny

        model = tiny(vocab_size=cell.vocab_size, hidden_size=H, tie_word_embeddings=cell.tied, num_key_value_heads=4)
    else:
        torch.manual_seed(0)
        model = TinyModel(cell.vocab_size, cell.tied, cell.bias)
    if cell.dtype != "float32":
        model.to(getattr(torch, cell.dtype)).float()  # the values that the engine starts from
    return model


def batches(cell: Cell, data_ranks: int) -> list[list[tuple[Tensor, Tensor]]]:
    """`[step][micro-step]` of ids and labels for all data-parallel ranks. No label is ignored, so that means of ranks
    and micro-steps weigh tokens equally."""
    generator = torch.Generator().manual_seed(1)
    shape = (data_ranks * ROWS, LENGTH)

    def one() -> tuple[Tensor, Tensor]:
        ids, labels = (torch.randint(cell.vocab_size, shape, generator=generator) for _ in range(2))
        return ids, labels

    return [[one() for _ in range(cell.accumulation)] for _ in range(STEPS)]


@dataclass
class Trained:
    """Losses and gradient norms of each optimizer step, and the parameters at the end."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]


def full_logits_loss(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    if not isinstance(model, TinyModel):
        return model(input_ids=ids, labels=labels).loss
    logits = F.linear(model.hidden(ids), model.lm_head.weight, model.lm_head.bias).float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train_alone(cell: Cell, data_ranks: int) -> Trained:
    """The reference: SGD on the whole batch in one process, cross entropy on full logits. In 16 bits: the parameters
    of forward and backward are rounded, those of the optimizer are float32, as ZeRO's are."""
    model = make_model(cell)
    low = model if cell.dtype == "float32" else make_model(cell).to(getattr(torch, cell.dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    trained = Trained([], [], {})
    for step in batches(cell, data_ranks):
        total = 0.0
        for ids, labels in step:
            loss = full_logits_loss(low, ids, labels) / cell.accumulation
            loss.backward()
            total += loss.item()
        if low is not model:
            for master, parameter in zip(model.parameters(), low.parameters(), strict=True):
                master.grad, parameter.grad = parameter.grad.float(), None  # type: ignore[union-attr]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cell.clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        if low is not model:
            with torch.no_grad():
                for master, parameter in zip(model.parameters(), low.parameters(), strict=True):
                    parameter.copy_(master)
        trained.losses.append(total)
        trained.norms.append(norm.item())
    trained.parameters = {name: value.detach() for name, value in model.named_parameters()}
    return trained


@contextlib.contextmanager
def deepspeed_ready(ctx: Context) -> Iterator[Any]:
    """DeepSpeed, quiet, without its compiled operators; its globals are as new afterwards."""
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.update(LOCAL_RANK=str(ctx.rank), RANK=str(ctx.rank), WORLD_SIZE=str(ctx.world))
    warnings.filterwarnings("ignore", category=FutureWarning)
    import deepspeed
    from deepspeed.module_inject import set_autotp_mode
    from deepspeed.runtime.tensor_parallel import init_utils
    from deepspeed.utils import groups, logger

    with pytest.MonkeyPatch.context() as patch:
        # Engines look whether their optimizer is Muon, and with it comes the compiler: seconds a process.
        patch.setattr(torch, "compile", lambda function=None, **_: function or (lambda f: f))
        import deepspeed.runtime.zero.muon.muon_optimizer

    logger.setLevel("ERROR")
    # No operator is compiled: that of shared memory takes most of a minute, and to ask which could be takes seconds.
    deepspeed.ops.__compatible_ops__ = {}
    try:
        with one_group_a_rank_set():
            yield deepspeed
    finally:
        groups._release_process_group_references()
        set_autotp_mode(training=False)
        init_utils._TP_MODEL_INIT_ARGS = None


_GROUPS: dict[tuple[int, ...], Any] = {}


@contextlib.contextmanager
def one_group_a_rank_set() -> Iterator[None]:
    """Engines get the group that an earlier one made of the same ranks. Each has several, and a gloo group polls until
    its process ends: hundreds of them leave no processor to anyone."""
    make = dist.new_group

    def new_group(ranks: list[int] | None = None, *args: Any, **keywords: Any) -> Any:
        key = tuple(range(dist.get_world_size()) if ranks is None else ranks)
        if key not in _GROUPS:
            _GROUPS[key] = make(ranks, *args, **keywords)
        return _GROUPS[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", new_group)
        patch.setattr(dist.device_mesh, "new_group", new_group)
        yield


def gathered(engine: Any) -> dict[str, Tensor]:
    """The engine's whole parameters: its fp32 masters where it has some."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    values = {}
    masters = iter(getattr(engine.optimizer, "fp32_groups", [[]])[0])  # ZeRO stage 0 in 16 bits
    for name, parameter in engine.module.named_parameters():
        master = safe_get_full_fp32_param(parameter) if engine.zero_optimization() else next(masters, None)
        if master is None:
            with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                master = parameter.detach()
        values[name] = master.detach().cpu().clone()
    return values


def steps(engine: Any, cell: Cell, trained: Trained, forward: Callable[..., Any] | None = None) -> None:
    """STEPS optimizer steps on this rank's part of the batches."""
    from flce_dist.integrations.deepspeed import step_normalizer

    data_ranks, rank = dist.get_world_size(engine.data_parallel_group), dist.get_rank(engine.data_parallel_group)
    mine = slice(rank * ROWS, (rank + 1) * ROWS)
    for step in batches(cell, data_ranks):
        total = torch.zeros((), device=engine.device)
        step = [(ids[mine].to(engine.device), labels[mine].to(engine.device)) for ids, labels in step]
        arguments: dict[str, Any] = {}
        if cell.normalized:
            targets = torch.stack([labels[:, 1:] if cell.llama else labels for _, labels in step])
            arguments["num_items_in_batch" if cell.llama else "normalizer"] = step_normalizer(engine, targets)
        for ids, labels in step:
            if cell.llama:
                loss = engine(input_ids=ids, labels=labels, **arguments).loss
            else:
                loss = (forward or engine)(ids, labels, **arguments)
            engine.backward(loss, scale_wrt_gas=not cell.normalized)
            engine.step()
            total += loss.detach().float() / (1 if cell.normalized else cell.accumulation)
        dist.all_reduce(total, group=engine.data_parallel_group)
        trained.losses.append(total.item() / data_ranks)
        trained.norms.append(float(engine.get_global_grad_norm() or 0.0))


class TwoByTwo:
    """Megatron's model-parallel unit, as far as DeepSpeed asks: ranks (0, 1) and (2, 3) are tensor-parallel."""

    def __init__(self, ctx: Context):
        self.tensor = ctx.groups[(0, 1) if ctx.rank < 2 else (2, 3)]
        self.data = ctx.groups[(0, 2) if ctx.rank % 2 == 0 else (1, 3)]

    def get_model_parallel_group(self) -> Any:
        return self.tensor

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self.tensor)

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self.tensor)

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_data_parallel_group(self) -> Any:
        return self.data

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.data)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.data)


def engine_of(cell: Cell, model: Any = None, **replaced: Any) -> Any:
    """The cell's engine by `flce_dist`'s initialize, with an optimizer that has a state; `replaced` are keys of its
    configuration."""
    from flce_dist.integrations.deepspeed import initialize

    model = model or make_model(cell)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    return initialize(model=model, optimizer=optimizer, config=cell.config() | replaced)[0]


def train_engine(ctx: Context, cell: Cell) -> Trained:
    """A worker's job: the cell's engine by `flce_dist`'s initialize, trained."""
    from flce_dist.integrations.deepspeed import initialize, shard_head_by_section

    with deepspeed_ready(ctx) as deepspeed:
        with deepspeed.zero.Init(config_dict_or_path=cell.config(), enabled=cell.zero_init):
            model = make_model(cell)
        config = cell.config()
        if cell.zero_init:
            shard_head_by_section(model, config)  # before the optimizer; else initialize does it
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        mpu = None
        if cell.mpu:
            mpu = TwoByTwo(ctx)
            start, stop = ((0, 20), (20, cell.vocab_size))[mpu.get_tensor_model_parallel_rank()]
            for parameter in model.lm_head.parameters():
                parameter.data = parameter.data[start:stop].clone()
        engine, *_ = initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)
        trained = Trained([], [], {})
        steps(engine, cell, trained)
        trained.parameters = gathered(engine)
        trained.parameters = joined(trained.parameters, model.lm_head, cell)
        engine.destroy()
    return trained


def joined(parameters: dict[str, Tensor], head: nn.Module, cell: Cell) -> dict[str, Tensor]:
    """The parameters, those that are sharded over the group of the head's loss put together."""
    group = head._flce_loss.arguments["group"]  # type: ignore[union-attr]
    if group is None:
        return parameters
    for name, whole in make_model(cell).named_parameters():
        local = parameters[name]
        if local.shape == whole.shape:
            continue
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, local, group=group)
        split = 0 if local.shape[1:] == whole.shape[1:] else 1
        parameters[name] = torch.cat(parts, split)[: whole.shape[0]]
    return parameters


BOUNDS = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}


def judge(cell: Cell, results: list[Trained], data_ranks: int) -> None:
    """All ranks against the reference: losses, gradient norms, and what the steps changed in each parameter."""
    expected = train_alone(cell, data_ranks)
    start = dict(make_model(cell).named_parameters())
    bound = BOUNDS[cell.dtype]
    for rank, trained in enumerate(results):
        for what in ("losses", "norms"):
            actual, wanted = getattr(trained, what), getattr(expected, what)
            if what == "norms" and cell.stage == 0:
                continue  # DeepSpeed reports none; parameters tell whether it clipped
            assert actual == pytest.approx(wanted, rel=bound), f"{what} of rank {rank}: {actual}, expected {wanted}"
        assert trained.parameters.keys() == expected.parameters.keys()
        for name, value in trained.parameters.items():
            first, wanted = start[name].detach(), expected.parameters[name]
            # Beside the gradients' error: each step rounds the float32 parameter, here and in the reference.
            allowed = bound * (wanted - first).norm() + 2 * STEPS * 2**-24 * first.norm()
            error = (value.float() - wanted).norm()
            assert (wanted - first).norm() > 20 * allowed, f"{name} hardly moves: this cell says nothing of it"
            assert error <= allowed, f"{name} on rank {rank}: off by {error:.3g}, allowed {allowed:.3g}"
