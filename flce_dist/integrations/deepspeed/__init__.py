"""DeepSpeed: the loss by a section "flce_dist" in the configuration that a run already has.

`initialize` is `deepspeed.initialize` plus the loss; `attach(engine)` is for trainers that make the engine themselves,
and `attach_to_trainer` and `attach_to_accelerator` are for those of Hugging Face. docs/deepspeed.md has the section's
keys and what each setting does. DeepSpeed itself is imported with the first call.

What is replaced, each on the instance (but for `deepspeed.initialize`), and why. All of it was written for DeepSpeed
0.19.8 and is tested with that version alone; names that begin with an underscore are private there.

| replaced | when | why |
|---|---|---|
| the head's `forward` | by `attach`, for good | the loss |
| a causal LM's `forward` and `loss_function` | by `attach`, for good | the loss; AutoTP had put its own there |
| the head's marks `tensor_model_parallel` | by `initialize`, before the engine; by `attach` | norms count it |
| `engine.backward` | by `attach`, for good | 0.19.8 divides by the accumulation steps although `scale_wrt_gas=False` |
| `engine.step` | by `attach`, until the first step | to warn when nothing has computed the loss |
| `accelerator.prepare` | by `attach_to_accelerator` and `attach_to_trainer`, for good | to replace the next |
| `deepspeed.initialize` | in `accelerator.prepare`, until it is called | `initialize` makes the engine |
| `trainer._get_num_items_in_batch` | by `attach_to_trainer`, for good | an exact count |

and for `"vocab_parallel": "data"`, whose head is an expert to ZeRO-3:

| replaced | when | why |
|---|---|---|
| the head's rows, marks and `forward` | by `shard_head_by_section`, for good | a rank keeps its own; no logits |
| `engine._zero3_consolidated_16bit_state_dict` | by `attach`, for good | exports would hold rank 0's rows |
| `engine.load_checkpoint` | by `attach`, for good | `load_optimizer_states=False` knows one partitioning for all |
| `engine.optimizer._rigid_load_state_dict` | during such a `load_checkpoint` | it restores parameters alone |
| `engine.optimizer.load_hp_checkpoint_state` | by `attach`, for good | universal: all rows would be loaded |
| `….load_hp_checkpoint_state_from_checkpoint_dir_stage3` | by `attach`, for good | universal: steps share a tensor |
"""

from .checkpoints import full_head
from .engine import attach, initialize, step_normalizer
from .heads import shard_head_by_section
from .section import Section, SectionWarning, json_schema, read_section
from .trainer import attach_to_accelerator, attach_to_trainer

__all__ = [
    "Section",
    "SectionWarning",
    "attach",
    "attach_to_accelerator",
    "attach_to_trainer",
    "full_head",
    "initialize",
    "json_schema",
    "read_section",
    "shard_head_by_section",
    "step_normalizer",
]
