"""Checkpoints and exports of a head that is sharded over the data-parallel ranks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ... import collectives
from .heads import DATA_SHARD, Layout, own_rows


def full_head(engine: Any) -> dict[str, Tensor]:
    """The weight (and bias) of a head that is sharded over the data-parallel ranks, whole, by their names in the
    model's state dict; for exports. On all ranks; called by all of them (one all-gather each).

    Raises:
        ValueError: the engine's head is not sharded so.
    """
    import deepspeed

    found = [(name, module) for name, module in engine.module.named_modules() if hasattr(module, DATA_SHARD)]
    if not found:
        raise ValueError('no head of this model is sharded by `"vocab_parallel": "data"`')
    (name, head), *_ = found
    layout: Layout = getattr(head, DATA_SHARD)
    full = {}
    for key, parameter in head.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            local = parameter.detach().clone()
        if layout.group is not None and layout.vocab_shard is not None:
            local = collectives.all_gather(local, layout.group).flatten(0, 1)[: layout.vocab_shard.vocab_size]
        full[f"{name}.{key}" if name else key] = local
    return full


def export_whole_head(engine: Any) -> None:
    """Lets the engine's consolidated state dict, from which `save_16bit_model`, accelerate and the transformers Trainer
    write a model, hold the whole head; DeepSpeed's own would hold rank 0's rows."""
    consolidate = engine._zero3_consolidated_16bit_state_dict

    def with_whole_head(*args: Any, **kwargs: Any) -> dict[str, Tensor] | None:
        state, head = consolidate(*args, **kwargs), full_head(engine)
        if state is not None:
            state |= {name: tensor.cpu() for name, tensor in head.items() if name in state}  # a frozen one may not be
        return state

    engine._zero3_consolidated_16bit_state_dict = with_whole_head


def load_without_optimizer_states(engine: Any) -> None:
    """Lets `load_checkpoint(load_optimizer_states=False)` restore the parameters, fp32 masters exactly; DeepSpeed's own
    would put them together by `zero_to_fp32`, which knows one partitioning for all parameters."""
    load = engine.load_checkpoint

    @functools.wraps(load)
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(load).bind(*args, **kwargs)
        if call.arguments.get("load_module_only"):
            raise ValueError(
                "load_module_only: a head that is never gathered is in the optimizer's files of a checkpoint; use "
                "load_optimizer_states=False, load_lr_scheduler_states=False"
            )
        if call.arguments.get("load_optimizer_states", True):
            return load(*args, **kwargs)
        if engine.load_universal_checkpoint():
            raise ValueError(
                "load_optimizer_states: false is not possible for a head that is never gathered and a universal "
                "checkpoint; load them, or load the checkpoint that it was made from on as many ranks"
            )
        call.arguments["load_optimizer_states"] = True
        load_state = engine.optimizer._rigid_load_state_dict
        engine.optimizer._rigid_load_state_dict = lambda state, **_: load_state(state, load_optimizer_states=False)
        try:
            return load(*call.args, **call.kwargs)
        finally:
            del engine.optimizer._rigid_load_state_dict

    engine.load_checkpoint = load_checkpoint


def load_own_rows(engine: Any, head: nn.Module) -> None:
    """Lets the engine load this rank's rows of a head that is sharded over the data-parallel ranks from a universal
    checkpoint, of such a head on any number of ranks or of a whole one; DeepSpeed's own would load all rows."""
    shard = getattr(head, DATA_SHARD).vocab_shard
    load = getattr(engine.optimizer, "load_hp_checkpoint_state", None)
    if load is None:
        return  # an engine for inference only
    vocab_size = head.out_features if shard is None else shard.vocab_size
    own = {id(parameter) for parameter in head.parameters()}

    def with_own_rows(folder: str, key: str, param: Any = None) -> Tensor:
        if id(param) not in own:
            return load(folder, key, param=param)
        saved = torch.load(Path(folder) / f"{key}.pt", map_location="cpu", weights_only=False)
        flat = saved["param"] if isinstance(saved, Mapping) else saved
        whole = flat.reshape(-1, *param.ds_shape[1:])[:vocab_size]  # behind it: padding of the ranks that wrote it
        if len(whole) != vocab_size:
            raise ValueError(f"{folder}: expected a head of {vocab_size} rows, got {len(whole)}")
        return (whole if shard is None else own_rows(whole, shard)).flatten()

    load_all = engine.optimizer.load_hp_checkpoint_state_from_checkpoint_dir_stage3

    def with_own_steps(checkpoint_dir: str) -> None:
        load_all(checkpoint_dir)
        # DeepSpeed 0.19.8 gives all groups of parameters, and the head is one, the same tensor: torch's optimizers
        # would count each of their steps once a group.
        for state in engine.optimizer.optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].clone()

    engine.optimizer.load_hp_checkpoint_state = with_own_rows
    engine.optimizer.load_hp_checkpoint_state_from_checkpoint_dir_stage3 = with_own_steps
