"""DeepSpeed: the loss by a section "flce_dist" in the configuration that a run already has.

`initialize` is `deepspeed.initialize` plus the loss; `attach(engine)` is for trainers that make the engine themselves,
and `attach_to_trainer` and `attach_to_accelerator` are for those of Hugging Face. docs/deepspeed.md has the section's
keys and what each setting does. DeepSpeed itself is imported with the first call.
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
