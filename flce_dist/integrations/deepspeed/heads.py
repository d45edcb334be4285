"""Where a model's head is, and how it is sharded: by AutoTP, by a model-parallel unit, or by us over data ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import collectives
from ...api import scale_gradient
from ...checks import check_own_forward, tied_names
from ...options import HiddenLayout
from ...shard import VocabShard
from ..transformers.heads import find_owner
from .section import Section, load_config, read_section

_NAMES = ("lm_head", "embed_out")
DATA_SHARD = "_flce_data_shard"


@dataclass(frozen=True)
class Layout:
    """Arguments of the loss that follow from how the head is sharded."""

    group: dist.ProcessGroup | None = None
    vocab_shard: VocabShard | None = None
    hidden_layout: HiddenLayout = "replicated"


def find_head(model: nn.Module, section: Section) -> nn.Module:
    """The head that the section names, or the model's output embeddings, or its `lm_head` or `embed_out`.

    Raises:
        ValueError: there is none, or no linear one; the message starts with the key's path.
    """
    if section.head is not None:
        try:
            named = model.get_submodule(section.head)
        except AttributeError as error:
            raise ValueError(f"{section.where}.head: {error}") from error
        weight = getattr(named, "weight", None)
        if isinstance(named, nn.Embedding) or len(getattr(weight, "ds_shape", getattr(weight, "shape", ()))) != 2:
            raise ValueError(f"{section.where}.head: {section.head!r} is no linear layer, but {type(named).__name__}")
        return named
    owner = find_owner(model) if hasattr(model, "get_output_embeddings") else None
    head = None if owner is None else owner.get_output_embeddings()
    if head is None:
        head = next((found for name in _NAMES if (found := getattr(model, name, None)) is not None), None)
    if not isinstance(head, nn.Module):
        raise ValueError(
            f"{section.where}.head: {type(model).__name__} has no {' or '.join(_NAMES)}: give the head's dotted name"
        )
    return head


def layout_of(head: nn.Module, section: Section, engine: Any) -> Layout:
    """How the loss sees `head`, checked against what the section says. With a sharded head that is not AutoTP's the
    tensor-parallel ranks exchange their numbers of rows (one all-gather of objects), and its parameters are marked as
    theirs.

    Raises:
        ValueError: the section says otherwise, or nothing where it must; starts with the key's path.
    """
    from deepspeed.module_inject.layers import LinearLayer, TensorParallel_Layer, VocabParallelLinear
    from deepspeed.utils.bwc import bwc_tensor_model_parallel_group, bwc_tensor_model_parallel_world_size

    where, wanted = f"{section.where}.vocab_parallel", section.vocab_parallel
    data: Layout | None = getattr(head, DATA_SHARD, None)
    if wanted == "data":
        if data is None:
            raise ValueError(
                f'{where}: "data" shards the head before deepspeed.initialize: call '
                "shard_head_by_section(model, config) before it, or initialize of this module instead of it"
            )
        return data
    if data is not None:
        raise ValueError(f'{where}: shard_head_by_section has sharded the head for "data", got {wanted!r}')
    if isinstance(head, TensorParallel_Layer) and collectives.world_size(head.mp_group) > 1:
        if type(head) not in (LinearLayer, VocabParallelLinear):
            raise ValueError(f"{where}: {type(head).__name__} does not shard the head's rows; expected a LinearLayer")
        if wanted == "none":
            raise ValueError(f'{where}: "none", but AutoTP has sharded the head; use "tensor" or leave the key out')
        sizes, rank = head._partition_sizes, head.tp_index
        start = sum(sizes[:rank])
        return Layout(head.mp_group, VocabShard(sum(sizes), start, start + sizes[rank]))
    # AutoTP would have sharded it as above, and sequence parallelism shards no weight; with a model-parallel unit the
    # model's author did, or did not.
    mpu = None if engine.autotp_size() > 1 or hasattr(engine.mpu, "initialize_sequence_parallel") else engine.mpu
    ranks = bwc_tensor_model_parallel_world_size(mpu)
    if wanted == "tensor" or (wanted is None and getattr(head.weight, "tensor_model_parallel", False)):
        if ranks < 2:
            raise ValueError(
                f'{where}: "tensor", but the {type(head).__name__} is not sharded: set tensor_parallel.autotp_size so '
                "that AutoTP shards it, or pass mpu to initialize with a head that holds this rank's rows"
            )
        return _rows_of_this_rank(head, bwc_tensor_model_parallel_group(mpu))
    if wanted is None and ranks > 1:
        raise ValueError(
            f"{where}: the {type(head).__name__} does not say whether it holds the whole vocabulary or this "
            f'tensor-parallel rank\'s part: say "none" or "tensor"'
        )
    return Layout()


def _rows_of_this_rank(head: nn.Module, group: dist.ProcessGroup) -> Layout:
    weight: Any = head.weight
    rows = getattr(weight, "ds_shape", weight.shape)[0]
    counts = collectives.all_gather_object(rows, group)
    rank = dist.get_rank(group)
    start = sum(counts[:rank])
    mark_tensor_parallel(head)
    return Layout(group, VocabShard(sum(counts), start, start + rows))


def mark_tensor_parallel(head: nn.Module) -> None:
    """Let gradient norms count each rank's rows: DeepSpeed counts an unmarked parameter on the first tensor-parallel
    rank only."""
    for parameter in head.parameters():
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def shard_head_by_section(model: nn.Module, config: Mapping[str, Any] | str) -> None:
    """Shards the head over the data-parallel ranks, once, when the section says `"vocab_parallel": "data"`. Each keeps
    `ceil(V / W)` rows (the last are padding) and their gradient and optimizer state; they are never gathered.

    `initialize` calls it. Call it yourself, on all ranks and before `deepspeed.initialize`, where a trainer makes the
    engine; the process group must exist. A parameter stays the object it is, unless the model was built under
    `deepspeed.zero.Init`: then call it before the optimizer is made.

    For DeepSpeed the shard is one expert a rank of an expert-parallel layer [1]: ZeRO-3 keeps it whole on its rank,
    adds the ranks' squared norms, and divides its gradient by the number of ranks as that of the body. The loss is
    one number for all ranks, so its gradient is multiplied by that number first.

    [1] Rajbhandari et al., DeepSpeed-MoE (2022); deepspeed/module_inject/auto_ep_layer.py.

    Raises:
        TypeError, ValueError: the section is wrong, the head is no plain `nn.Linear` or has another forward, it is
            tied, or model parallelism is on.
    """
    from deepspeed.utils import groups

    config = load_config(config)
    section = read_section(config)
    if section is None or section.vocab_parallel != "data":
        return
    where = f"{section.where}.vocab_parallel"
    head = find_head(model, section)
    if hasattr(head, DATA_SHARD):
        return
    if type(head) is not nn.Linear:
        raise TypeError(f'{where}: "data" shards an nn.Linear, and the head is a {type(head).__name__}')
    check_own_forward(head, f"{where}: the head")
    shared = tied_names(model, head.weight)
    if len(shared) > 1:
        raise ValueError(f'{where}: "data" cannot shard a tied weight ({" is ".join(shared)}); untie it or use "none"')
    ranks = dist.get_world_size()
    if ranks == 1:
        setattr(head, DATA_SHARD, Layout())
        return
    # The groups of expert parallelism over all ranks: one of all, and one of each rank alone.
    groups._create_expert_and_data_parallel(ranks)
    name = f"ep_size_{ranks}"
    group, alone = groups._get_expert_parallel_group(name), groups._get_expert_data_parallel_group(name)
    vocab_size = head.out_features
    padded = ranks * -(-vocab_size // ranks)
    shard = VocabShard.even(vocab_size, dist.get_rank(group), ranks, padded)
    for key, parameter in list(head.named_parameters()):
        local = _rows(parameter, shard)
        if hasattr(parameter, "ds_id"):
            parameter = nn.Parameter(local, parameter.requires_grad)
            setattr(head, key, parameter)
        else:
            parameter.data = local
        marks = {
            "allreduce": False,  # not broadcast from rank 0
            "group_name": name,
            "ds_zero_placement_family": "autoep_expert",
            "ds_zero_partition_group_name": name,
            "ds_zero_partition_process_group": alone,
        }
        for mark, value in marks.items():
            setattr(parameter, mark, value)
    head.out_features = shard.num_rows
    head.forward = _no_logits  # type: ignore[method-assign]
    if section.options.get("reduction") != "none":  # those are losses of this rank's tokens, whose mean DeepSpeed takes
        head.register_forward_hook(lambda _module, _args, output: scale_gradient(output, ranks))
    setattr(head, DATA_SHARD, Layout(group, shard, "sharded"))


def _rows(parameter: nn.Parameter, shard: VocabShard) -> Tensor:
    """This rank's rows of a parameter that ZeRO-3 may have partitioned."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")), torch.no_grad():
        return own_rows(parameter, shard)


def own_rows(whole: Tensor, shard: VocabShard) -> Tensor:
    """This rank's rows, padded with zeros."""
    local = whole.new_zeros(shard.num_rows, *whole.shape[1:])
    local[: shard.num_columns] = whole[shard.start : shard.start + shard.num_columns]
    return local


def _no_logits(*args: Any, **kwargs: Any) -> Tensor:
    raise RuntimeError(
        "the head is sharded over the data-parallel ranks, which hold different tokens: it gives a loss (pass the "
        "target), and no logits; for those, load the exported model"
    )
