"""The cases of other projects' own suites, run against `linear_cross_entropy`: their shapes, dtypes, options, group
sizes and tolerances, in code of our own. What was read, in autumn 2026:

- pytorch/pytorch (2.13): `torch/testing/_internal/common_modules.py` and `common_methods_invocations.py`,
  `test/test_nn.py`, `test/nn/test_linear_cross_entropy.py`, `test/distributed/tensor/test_math_ops.py`
- apple/ml-cross-entropy: all `tests/test_*.py`; and `test_fsdp_vocab_parallel.py` of a fork
- linkedin/Liger-Kernel: `test/transformers/test_fused_linear_cross_entropy.py` and
  `test_fused_linear_scaled_cross_entropy.py`, `test/megatron/test_cross_entropy.py`
- fla-org/flash-linear-attention: `tests/modules/test_cross_entropy.py`
- Dao-AILab/flash-attention: `tests/losses/test_cross_entropy_parallel.py`
- deepspeedai/DeepSpeed: the tests of `deepspeed/sequence/linear_cross_entropy.py`, and
  `tests/unit/v1/sequence_parallelism/test_liger_vocab_parallel_cross_entropy.py`
- NVIDIA/Megatron-LM: `tests/unit_tests/fusions/test_fused_linear_cross_entropy.py` and `test_fused_cross_entropy.py`,
  `tests/unit_tests/tensor_parallel/test_cross_entropy.py`, and megatron-lite's tests of its chunked loss
- NVIDIA/TransformerEngine: `tests/pytorch/test_parallel_cross_entropy.py`
- volcengine/verl: `tests/utils/test_special_linear_cross_entropy_tp.py`
- pytorch/torchtitan: `tests/unit_tests/test_loss.py`

Where a suite asks for something else than this package promises, its case asserts what is promised instead:

- The mean over no valid token is 0, not nan; the loss is float32 for 16-bit inputs.
- Targets are class ids; probabilities are refused. A weight has two dimensions (torch's has K more, for K-dimensional
  targets). Hidden states may have any number of leading dimensions (torch's at most one).
- No forward-mode and no second derivatives.
- z-loss is an option, not a function of a differentiable log-sum-exp; the entropy has no gradient.
- Hidden states are shifted by the caller. With token-sharded hidden states targets and per-token losses are the rank's.
- A target out of range is an error, also where a neighbour masks it.
- Predictions are given for ignored tokens too, where Liger gives -1.
- 16-bit logits are rounded to 16 bits, as eager `linear` does. Suites whose reference keeps them in float32 run with
  `logits_dtype=torch.float32`, which is the option for it.

Suites of losses that take logits pass them through an identity weight, with a smaller vocabulary where theirs is large.
Sizes that need a GPU are in `tests/gpu/test_neighbours.py`.
"""
