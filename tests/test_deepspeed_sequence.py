"""Sequence parallelism of DeepSpeed (Ulysses): its attention and data loader, and the loss on each rank's tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.kit.skips import needs

pytest.importorskip("transformers", reason=needs("hf"))
pytest.importorskip("deepspeed", reason=needs("deepspeed"))

from flce_dist.integrations.deepspeed import attach_to_trainer, initialize, step_normalizer
from tests.kit.causal_lm import VOCAB, tiny
from tests.kit.engines import LR, ROWS, Cell, Trained, batches, deepspeed_ready, gathered, joined, make_model
from tests.kit.workers import Context, Pool

Engines = Callable[[int], Pool]
LENGTH, STEPS = 12, 4


@dataclass(frozen=True)
class Run:
    stage: int
    sequence_ranks: int
    accumulation: int = 1

    @property
    def id(self) -> str:
        return f"zero{self.stage}-sequence{self.sequence_ranks}-acc{self.accumulation}"


def texts(count: int) -> tuple[Tensor, Tensor]:
    """Of each another number of labels is ignored, so that of some all tokens of a rank are."""
    ids = torch.randint(3, VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    for row in range(count):
        labels[row, : 5 + row % 5] = -100
    return ids, labels


def model() -> Any:
    return tiny(num_key_value_heads=4, attn_implementation="sdpa")


def alone(texts_a_step: int) -> Trained:
    """One process: the mean over the labels of all texts of a step."""
    whole = model()
    optimizer = torch.optim.SGD(whole.parameters(), lr=LR)
    trained = Trained([], [], {})
    for ids, labels in zip(*(tensor.split(texts_a_step) for tensor in texts(STEPS * texts_a_step)), strict=True):
        loss = whole(input_ids=ids, labels=labels).loss
        loss.backward()
        trained.losses.append(loss.item())
        trained.norms.append(nn.utils.clip_grad_norm_(whole.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    trained.parameters = {name: value.detach() for name, value in whole.named_parameters()}
    return trained


@contextlib.contextmanager
def ulysses(ctx: Context, whole: Any, ranks: int) -> Iterator[Any]:
    """The model-parallel unit of DeepSpeed's attention, which is registered in transformers for this while."""
    with deepspeed_ready(ctx) as deepspeed, ulysses_undone():
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        deepspeed.init_distributed("gloo", dist_init_required=False)
        yield UlyssesSPAttentionHF.register_with_transformers(
            whole, core_attn_implementation="sdpa", sequence_parallel_size=ranks, micro_batch_size=1
        )


@contextlib.contextmanager
def ulysses_undone() -> Iterator[None]:
    """What DeepSpeed's attention leaves in globals is as it was afterwards."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = plain
        parallel_state_sp._release_sequence_parallel_groups()


def _train(ctx: Context, run: Run) -> Trained:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

    whole = model()
    with ulysses(ctx, whole, run.sequence_ranks) as mpu:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": run.accumulation,
            "gradient_clipping": 0.5,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": run.stage},
            "flce_dist": {},
        }
        if run.stage == 3:
            config["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # type: ignore[index]
        optimizer = torch.optim.SGD(whole.parameters(), lr=LR)
        engine = initialize(model=whole, optimizer=optimizer, config=config, mpu=mpu)[0]
        group, everyone = mpu.get_sequence_parallel_group(), mpu.get_sequence_data_parallel_group()
        # Each rank reads texts of its own; all ranks of its sequence then get a part of one after another.
        rank, data_ranks = dist.get_rank(group), ctx.world // run.sequence_ranks
        ids, labels = texts(STEPS * run.accumulation * data_ranks)
        first = rank * data_ranks + ctx.rank // run.sequence_ranks
        read = [
            {"input_ids": one[None], "labels": label[None], "position_ids": torch.arange(LENGTH)[None]}
            for one, label in zip(ids[first :: ctx.world], labels[first :: ctx.world], strict=True)
        ]
        loader = UlyssesSPDataLoaderAdapter(read, rank, group, run.sequence_ranks, torch.device("cpu"))
        parts = list(loader)
        trained = Trained([], [], {})
        for step in range(STEPS):
            micro = parts[step * run.accumulation : (step + 1) * run.accumulation]
            count = step_normalizer(engine, torch.cat([part["shift_labels"] for part in micro]))
            total = torch.zeros(())
            for part in micro:
                loss = engine(**part, num_items_in_batch=count).loss
                engine.backward(loss, scale_wrt_gas=False)
                engine.step()
                total += loss.detach()
            dist.all_reduce(total, group=everyone)
            averaged = ctx.world if run.stage == 3 else ctx.world / run.sequence_ranks
            trained.losses.append(total.item() / averaged)
            trained.norms.append(float(engine.get_global_grad_norm() or 0.0))
        trained.parameters = gathered(engine)
        engine.destroy()
    return trained


def assert_same(found: Trained, expected: Trained, stage: int) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    if stage:  # without ZeRO, DeepSpeed reports no norm; parameters tell whether it clipped
        assert found.norms == pytest.approx(expected.norms, rel=1e-5)
    start = model().state_dict()
    for name, value in expected.parameters.items():
        moved = (value - start[name]).norm()
        assert (found.parameters[name] - value).norm() <= 1e-4 * moved + 1e-7, name


@pytest.mark.parametrize(
    ("world", "run"),
    [
        (2, Run(2, 2, accumulation=2)),
        (2, Run(3, 2, accumulation=2)),
        (4, Run(1, 2, accumulation=2)),
        (4, Run(3, 2)),
        (4, Run(3, 4)),
        *(
            pytest.param(*more, marks=pytest.mark.exhaustive)
            for more in ((2, Run(0, 2)), (4, Run(0, 2)), (4, Run(2, 4)))
        ),
    ],
    ids=lambda value: value.id if isinstance(value, Run) else str(value),
)
def test_token_sharded_hidden_states_train_as_one_process(world: int, run: Run, engine_workers: Engines) -> None:
    expected = alone(run.accumulation * world // run.sequence_ranks)
    for found in engine_workers(world).run(world, _train, run):
        assert_same(found, expected, run.stage)


def _trainer(ctx: Context, section: dict[str, Any] | None, folder: str) -> list[tuple[float, float]]:
    import transformers
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    from tests.test_deepspeed_trainer import Run as TrainerRun
    from tests.test_deepspeed_trainer import hugging_face_ready
    from tests.test_hf_trainer import history

    with hugging_face_ready(ctx), ulysses_undone():
        handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
        parallel = ParallelismConfig(sp_backend="deepspeed", sp_size=2, sp_handler=handler)
        options = {"report_to": "none", "max_steps": 3, "logging_steps": 1, "learning_rate": 1e-2}
        options |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "save_strategy": "no"}
        args = transformers.TrainingArguments(
            folder, deepspeed=TrainerRun(3, section).deepspeed_config(), parallelism_config=parallel, **options
        )
        data = [
            {"input_ids": ids, "labels": labels, "position_ids": torch.arange(LENGTH)}
            for ids, labels in zip(*texts(12), strict=True)
        ]
        trainer = transformers.Trainer(model=model(), args=args, train_dataset=data)
        if section is not None:
            attach_to_trainer(trainer)
        trainer.train()
        assert hasattr(trainer.model.lm_head, "_flce_loss") == (section is not None)
        trainer.deepspeed.destroy()
        return history(trainer)


def test_a_trainers_sequence_parallelism_is_that_of_the_stock_loss(engine_workers: Engines, tmp_path: Path) -> None:
    """`ParallelismConfig(sp_size=2, sp_backend="deepspeed")`: the Trainer weighs the ranks' losses itself."""
    pytest.importorskip("accelerate", reason=needs("hf"))
    expected = engine_workers(2).run(2, _trainer, None, str(tmp_path))[0]
    found = engine_workers(2).run(2, _trainer, {}, str(tmp_path))[0]
    assert len(found) == 3
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def uneven(cell: Cell, data_ranks: int) -> list[list[tuple[Tensor, Tensor]]]:
    """`batches`, with another number of ignored labels for each rank and micro-step."""
    steps = batches(cell, data_ranks)
    for step in steps:
        for number, (_, labels) in enumerate(step):
            for row in range(len(labels)):
                labels[row, : (row + 2 * number) % 5] = -100
    return steps


def _data_parallel(ctx: Context, cell: Cell) -> dict[str, Tensor]:
    with deepspeed_ready(ctx):
        whole = make_model(cell)
        engine = initialize(model=whole, optimizer=torch.optim.SGD(whole.parameters(), lr=LR), config=cell.config())[0]
        rank, data_ranks = dist.get_rank(engine.data_parallel_group), dist.get_world_size(engine.data_parallel_group)
        mine = slice(rank * ROWS, (rank + 1) * ROWS)
        for step in uneven(cell, data_ranks):
            targets = torch.cat([labels[mine] for _, labels in step])
            count = step_normalizer(engine, targets[:, 1:] if cell.llama else targets)
            for ids, labels in step:
                if cell.llama:
                    loss = engine(input_ids=ids[mine], labels=labels[mine], num_items_in_batch=count).loss
                else:
                    loss = engine(ids[mine], labels[mine], normalizer=count)
                engine.backward(loss, scale_wrt_gas=False)
                engine.step()
        parameters = joined(gathered(engine), engine.module.lm_head, cell)
        engine.destroy()
        return parameters


@pytest.mark.parametrize(
    ("world", "cell"),
    [
        (2, Cell(3, accumulation=2)),
        (2, Cell(3, accumulation=2, section={"vocab_parallel": "data"})),
        (2, Cell(3, accumulation=2, llama=True)),
        (2, Cell(3, accumulation=2, llama=True, section={"vocab_parallel": "data"})),
        (4, Cell(1, accumulation=2, llama=True, extra={"tensor_parallel": {"autotp_size": 2}})),
    ],
    ids=lambda value: value.id if isinstance(value, Cell) else str(value),
)
def test_step_normalizer_weighs_all_tokens_of_data_parallel_ranks_equally(
    world: int, cell: Cell, engine_workers: Engines
) -> None:
    whole = make_model(cell)
    optimizer = torch.optim.SGD(whole.parameters(), lr=LR)
    for step in uneven(cell, 2):
        ids, labels = (torch.cat(tensors) for tensors in zip(*step, strict=True))
        if cell.llama:
            loss = whole(input_ids=ids, labels=labels).loss
        else:
            loss = nn.functional.cross_entropy(whole.lm_head(whole.hidden(ids)).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in engine_workers(world).run(world, _data_parallel, cell):
        for name, value in whole.named_parameters():
            torch.testing.assert_close(found[name], value.detach(), rtol=1e-4, atol=1e-6, msg=name)


def _refused(ctx: Context) -> None:
    target = torch.zeros(1, dtype=torch.int64)
    whole = model()
    with ulysses(ctx, whole, 2) as mpu:
        import deepspeed

        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "reduce_scatter": False}}
        config |= {"zero_allow_untested_optimizer": True, "flce_dist": {}}
        optimizer = torch.optim.SGD(whole.parameters(), lr=LR)
        engine = initialize(model=whole, optimizer=optimizer, config=config, mpu=mpu)[0]
        with pytest.raises(ValueError, match=r"^zero_optimization.reduce_scatter: .*must be true"):
            step_normalizer(engine, target)
        engine.destroy()
        plain = deepspeed.initialize(model=model(), config=config | {"zero_optimization": {"stage": 0}}, mpu=mpu)[0]
        with pytest.raises(ValueError, match=r"no loss of a section: .*attach\(engine\)"):
            step_normalizer(plain, target)
        plain.destroy()


def test_step_normalizer_refuses_what_it_cannot_make_right(engine_workers: Engines) -> None:
    engine_workers(2).run(2, _refused)
