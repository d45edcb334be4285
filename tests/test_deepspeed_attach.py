"""What the DeepSpeed integration does around the steps: attaching, refusing, gathers, shards, checkpoints, exports."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.kit.skips import needs

pytest.importorskip("deepspeed", reason=needs("deepspeed"))

from flce_dist import VocabParallelHead
from flce_dist.attach import detach_loss
from flce_dist.integrations.deepspeed import SectionWarning, attach, full_head, initialize, shard_head_by_section
from tests.kit.engines import (
    LR,
    ROWS,
    Cell,
    H,
    TinyModel,
    Trained,
    batches,
    deepspeed_ready,
    engine_of,
    gathered,
    judge,
    make_model,
    steps,
)
from tests.kit.trace import Trace
from tests.kit.workers import Context, Pool

Engines = Callable[[int], Pool]
DATA = {"vocab_parallel": "data"}


def inputs_of(cell: Cell, ctx: Context) -> tuple[Tensor, Tensor]:
    ids, labels = batches(cell, ctx.world)[0][0]
    mine = slice(ctx.rank * ROWS, (ctx.rank + 1) * ROWS)
    return ids[mine], labels[mine]


def _attach(ctx: Context) -> None:
    """deepspeed.initialize, then attach; returns the head, and knows the engine's config whatever it was given as."""
    cell = Cell(3, clip=0.3, section={"label_smoothing": 0.1})
    with deepspeed_ready(ctx) as deepspeed:
        model = make_model(cell)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=cell.config())
        head = attach(engine)
        assert head is engine.module.lm_head
        ids, labels = inputs_of(cell, ctx)
        loss = engine(ids, labels)
        whole = make_model(cell)
        logits = F.linear(whole.hidden(ids), whole.lm_head.weight)
        expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        torch.testing.assert_close(loss, expected)
        with pytest.raises(ValueError, match=r"^flce_dist: this engine has its loss already\. initialize attaches it"):
            attach(engine)
        with pytest.raises(TypeError, match="model: expected the module itself, got the DeepSpeedEngine around it"):
            initialize(model=engine, config=cell.config())
        engine.destroy()
        with pytest.raises(
            ValueError, match=r"^flce_dist: the TinyModel has a loss already, from apply, attach_loss or"
        ):
            engine_of(cell, model)
        detach_loss(head)
        engine_of(cell, model).destroy()


def test_attach_after_deepspeed_initialize(engine_workers: Engines) -> None:
    engine_workers(2).run(2, _attach)


def _without_section(ctx: Context) -> None:
    with deepspeed_ready(ctx):
        for name, hint in (("flce-dist", "did you mean the section"), ("steps_per_print", "no section")):
            model = make_model(Cell())
            config = {"train_micro_batch_size_per_gpu": ROWS, name: 10 if name == "steps_per_print" else {}}
            forward = model.lm_head.forward
            with pytest.warns(SectionWarning, match=hint):
                engine, *_ = initialize(
                    model=model, optimizer=torch.optim.SGD(model.parameters(), lr=LR), config=config
                )
            assert engine.module.lm_head.forward == forward
            engine.destroy()


def test_without_a_section_the_model_keeps_its_loss_and_there_is_a_warning(engine_workers: Engines) -> None:
    engine_workers(2).run(2, _without_section)


def _without_model(ctx: Context) -> None:
    with deepspeed_ready(ctx) as deepspeed:
        for start in (deepspeed.initialize, initialize):
            with pytest.raises(AssertionError, match="requires a model"):
                start(config=Cell().config())


def test_without_a_model_it_is_deepspeed_that_says_so(engine_workers: Engines) -> None:
    engine_workers(1).run(1, _without_model)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(H, 37)


def _refused(ctx: Context, cell: Cell, kind: str) -> None:
    with deepspeed_ready(ctx):
        model = Odd() if kind == "odd" else make_model(cell)
        if kind == "bilinear":
            model.lm_head = nn.Bilinear(H, H, 37)
        if kind == "own loss":
            model.lm_head = VocabParallelHead(H, 37, ignore_index=0)
        if kind == "scaled":
            model.lm_head.forward = lambda hidden: 2 * F.linear(hidden, model.lm_head.weight)
        engine_of(cell, model)


@pytest.mark.parametrize(
    ("cell", "kind", "message"),
    [
        (Cell(), "odd", "flce_dist.head: Odd has no lm_head or embed_out"),
        (Cell(section={"head": "model.lm_head"}), "", "flce_dist.head: .*model"),
        (Cell(section={"head": "embed"}), "", "flce_dist.head: 'embed' is no linear layer, but Embedding"),
        (Cell(section={"vocab_parallel": "tensor"}), "", "flce_dist.vocab_parallel: .*autotp_size"),
        (Cell(3, tied=True, section=DATA), "", "flce_dist.vocab_parallel: .*tied.*embed.weight is lm_head.weight"),
        (Cell(3, section=DATA), "bilinear", "flce_dist.vocab_parallel: .*nn.Linear.*Bilinear"),
        (Cell(3, section=DATA), "scaled", "flce_dist.vocab_parallel: .*another forward than its class"),
        (Cell(), "own loss", "flce_dist: the head is a VocabParallelHead, which computes a loss of its own options"),
        (Cell(llama=True), "own loss", "flce_dist: the head is a VocabParallelHead"),
        (Cell(2, section=DATA), "", "flce_dist.vocab_parallel: .*stage 3, got 2"),
        (
            Cell(2, extra={"sequence_parallel_size": 2, "data_parallel_size": 1}),
            "",
            "sequence_parallel_size: 2 without an",
        ),
        (Cell(2, section={"z_loss": -1}), "", "flce_dist.z_loss must not be negative"),
        (Cell(2, section={"reduction": "sum"}, llama=True), "", "flce_dist.reduction: a LlamaForCausalLM returns one"),
    ],
    ids=str,
)
def test_refused_on_all_ranks_before_the_first_step(
    cell: Cell, kind: str, message: str, engine_workers: Engines
) -> None:
    for outcome in engine_workers(2).outcomes(2, _refused, cell, kind):
        assert outcome.error is not None
        assert {"TypeError", "ValueError"} & set(outcome.error.classes)
        assert re.match(message, outcome.error.message), outcome.error.message


def _data_after_the_engine(ctx: Context) -> None:
    with deepspeed_ready(ctx) as deepspeed:
        model, cell = make_model(Cell(3)), Cell(3, section=DATA)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=cell.config())
        with pytest.raises(ValueError, match=r"flce_dist.vocab_parallel: .*shard_head_by_section\(model, config\)"):
            attach(engine)
        engine.destroy()
        model = make_model(cell)
        shard_head_by_section(model, cell.config())
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        with pytest.raises(
            ValueError, match=r"flce_dist.vocab_parallel: .*has sharded the head for \"data\", got None"
        ):
            initialize(model=model, optimizer=optimizer, config=Cell(3).config())
        with deepspeed.zero.Init(config_dict_or_path=cell.config()):
            model = make_model(cell)
        with pytest.raises(ValueError, match=r"flce_dist.vocab_parallel: .*zero.Init"):
            initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=LR), config=cell.config())
        with pytest.raises(ValueError, match=r"flce_dist.vocab_parallel: .*zero.Init.* model_parameters holds"):
            initialize(model=model, model_parameters=list(model.parameters()), config=cell.config())


def test_a_head_is_sharded_before_the_engine_is_made(engine_workers: Engines) -> None:
    engine_workers(2).run(2, _data_after_the_engine)


def _autotp_says_none(ctx: Context) -> None:
    with deepspeed_ready(ctx):
        cell = Cell(1, llama=True, section={"vocab_parallel": "none"}, extra={"tensor_parallel": {"autotp_size": 2}})
        engine_of(cell)


def test_none_under_autotp_is_refused(engine_workers: Engines) -> None:
    for outcome in engine_workers(2).outcomes(2, _autotp_says_none):
        assert outcome.error is not None
        assert outcome.error.message.startswith('flce_dist.vocab_parallel: "none", but AutoTP has sharded the head')


def _own_loop(ctx: Context) -> Trained:
    """The engine's forward gives hidden states; the loss is made by calling the head on them."""
    cell = Cell(3, accumulation=2, clip=0.3)
    with deepspeed_ready(ctx):
        model = make_model(cell)
        model.forward = model.hidden
        engine = initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=LR), config=cell.config())[0]
        trained = Trained([], [], {})

        def own_loss(ids: Tensor, labels: Tensor) -> Tensor:
            return engine.module.lm_head(engine(ids), labels)

        steps(engine, cell, trained, own_loss)
        trained.parameters = gathered(engine)
        engine.destroy()
    return trained


def test_a_loop_of_ones_own_calls_the_head(engine_workers: Engines) -> None:
    judge(Cell(3, accumulation=2, clip=0.3), engine_workers(2).run(2, _own_loop), 2)


def _gathers(ctx: Context, section: dict[str, Any] | None, zero: dict[str, Any]) -> list[int]:
    """Sizes of what all-gathers of one step bring together, the first step's left out."""
    cell = Cell(3, section=section or {}, zero=zero)
    with deepspeed_ready(ctx), warnings.catch_warnings():
        warnings.simplefilter("ignore", SectionWarning)
        model = make_model(cell)
        if section is None:
            model.forward = lambda ids, labels: F.cross_entropy(
                model.lm_head(model.hidden(ids)).flatten(0, 1), labels.flatten()
            )
        config = cell.config()
        if section is None:
            del config["flce_dist"]
        engine = initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=LR), config=config)[0]
        ids, labels = inputs_of(cell, ctx)
        sizes = []
        for step in range(2):
            with Trace() as trace:
                engine.backward(engine(ids, labels))
                engine.step()
            if step == 1:
                events = [event for event in trace.events if event.name == "all_gather"]
                sizes = sorted(max(torch.Size(shape).numel() for shape in event.shapes) for event in events)
        engine.destroy()
    return sizes


def test_the_head_is_gathered_as_often_as_with_a_stock_loss_and_never_when_sharded(engine_workers: Engines) -> None:
    sections: list[Any] = [None, {}, DATA | {"check_ranks": "never"}]
    stock, ours, sharded = (engine_workers(2).run(2, _gathers, section, {})[0] for section in sections)
    head, rest = 37 * H, 37 * H + H * (H + 1) + 2 * H
    assert stock == [rest + head], "in the second step DeepSpeed gathers all in one"
    assert ours == stock
    assert max(sharded) == rest
    assert all(size <= 24 * H for size in sharded if size < rest)  # hidden states, targets, statistics of 24 tokens


def test_the_head_is_gathered_as_often_as_with_a_stock_loss_where_each_module_gathers_for_itself(
    engine_workers: Engines,
) -> None:
    """In forward and in backward; the embedding, of the head's size, needs no weight in backward."""
    alone = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0}
    stock, ours = (engine_workers(2).run(2, _gathers, section, alone)[0] for section in (None, {}))
    assert stock.count(37 * H) >= 3
    assert ours == stock


def _own_cross_entropy(ctx: Context, kind: str) -> list[str]:
    """What is warned of in two steps. In evaluation and without labels the head gives logits, which is no fault."""
    cell = Cell(3)
    with deepspeed_ready(ctx), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = make_model(cell)

        def forward(ids: Tensor, labels: Tensor | None = None) -> Tensor:
            hidden = model.hidden(ids)
            if labels is None:
                return model.lm_head(hidden)
            if kind == "by the head":
                return model.lm_head(hidden, target=labels)
            return F.cross_entropy(model.lm_head(hidden).flatten(0, 1), labels.flatten())

        model.forward = forward
        engine = engine_of(cell, model)
        ids, labels = inputs_of(cell, ctx)
        engine.eval()
        with torch.no_grad():
            assert engine(ids).shape == (*ids.shape, 37)
        engine.train()
        for _ in range(2):
            engine.backward(engine(ids, labels))
            engine.step()
        engine.destroy()
        return [str(warning.message) for warning in caught if issubclass(warning.category, SectionWarning)]


def test_a_model_with_a_loss_of_its_own_warns_in_the_first_step(engine_workers: Engines) -> None:
    for warned in engine_workers(2).run(2, _own_cross_entropy, "of its own"):
        (message,) = warned
        assert message.startswith("flce_dist: no loss of this section was computed before the first step")
        assert "self.lm_head(hidden, labels)" in message
    assert engine_workers(2).run(2, _own_cross_entropy, "by the head") == [[], []]


def _without_labels(ctx: Context) -> list[str]:
    """What is warned of in two steps of a model of transformers whose loss is made from its logits."""
    cell = Cell(2, llama=True)
    with deepspeed_ready(ctx), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = engine_of(cell)
        ids, labels = inputs_of(cell, ctx)
        for _ in range(2):
            engine.backward(F.cross_entropy(engine(input_ids=ids).logits.flatten(0, 1), labels.flatten()))
            engine.step()
        engine.destroy()
        return [str(warning.message) for warning in caught if issubclass(warning.category, SectionWarning)]


def test_a_causal_lm_that_is_called_without_labels_warns_in_the_first_step(engine_workers: Engines) -> None:
    for (message,) in engine_workers(2).run(2, _without_labels):
        assert message.startswith("flce_dist: no loss of this section was computed before the first step")
        assert "nothing called the LlamaForCausalLM with labels" in message


def _shards(ctx: Context) -> None:
    cell = Cell(3, section=DATA, bias=True)
    with deepspeed_ready(ctx):
        whole = make_model(cell).lm_head
        engine = engine_of(cell)
        head = engine.module.lm_head
        rows = -(-37 // ctx.world)
        assert head.out_features == rows
        for parameter in head.parameters():
            assert parameter.ds_shape[0] == rows
            assert parameter.ds_tensor.numel() == parameter.ds_numel  # its own partition, whole
            assert not getattr(parameter, "tensor_model_parallel", False)
        optimized = sum(p.numel() for group in engine.optimizer.fp32_partitioned_groups_flat for p in [group])
        body = sum(p.numel() for p in make_model(cell).parameters()) - 37 * (H + 1)
        assert optimized == body // ctx.world + rows * (H + 1)
        full = full_head(engine)
        assert list(full) == ["lm_head.weight", "lm_head.bias"]
        assert torch.equal(full["lm_head.weight"], whole.weight)
        assert torch.equal(full["lm_head.bias"], whole.bias)
        with pytest.raises(RuntimeError, match="no logits"):
            engine.module.lm_head(torch.zeros(2, H))
        engine.destroy()
        plain = engine_of(Cell(3))
        with pytest.raises(ValueError, match="no head of this model is sharded"):
            full_head(plain)
        plain.destroy()


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_holds_its_rows_and_their_state(world: int, engine_workers: Engines) -> None:
    engine_workers(world).run(world, _shards)


def _shard_only_when_asked(ctx: Context) -> None:
    with deepspeed_ready(ctx):
        model = TinyModel(37)
        parameter = model.lm_head.weight
        shard_head_by_section(model, {})
        shard_head_by_section(model, {"flce_dist": {}})
        assert model.lm_head.weight.shape == (37, H)
        for _ in range(2):  # once is enough
            shard_head_by_section(model, Cell(3, section=DATA).config())
            assert model.lm_head.weight.shape == (19, H)
            assert model.lm_head.weight is parameter


def test_the_head_is_sharded_only_when_the_section_says_so(engine_workers: Engines) -> None:
    engine_workers(2).run(2, _shard_only_when_asked)
