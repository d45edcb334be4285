"""The judge: the loss of the whole table of options on the full weight, in float64, in the plainest torch.

Gradients come from autograd. Nothing here is shared with the package. Shapes: hidden [N, H], weight [V, H], target [N],
bias [V], class_weight [V], token_weight [N]; V is the true vocabulary, without padding rows.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Reference:
    """Loss (0-d, or [N] for "none"), gradients of the full inputs, and the auxiliary outputs by name."""

    loss: Tensor
    hidden_grad: Tensor
    weight_grad: Tensor
    bias_grad: Tensor | None
    aux: dict[str, Tensor] = field(default_factory=dict)


def scaled_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, logit_scale: float
) -> Tensor:
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    logits = logit_scale * logits
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def loss_and_aux(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_scaling: bool = False,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The differentiable float64 loss and what `aux` can name, for float64 inputs."""
    vocab_size = weight.shape[0]
    logits = scaled_logits(hidden, weight, bias, softcap, logit_scale)
    lse = torch.logsumexp(logits, dim=-1)
    log_prob = logits - lse[:, None]
    valid = target != ignore_index
    label = torch.where(valid, target, 0).long()
    column_weight = torch.ones(vocab_size, dtype=logits.dtype) if class_weight is None else class_weight
    token_factor = torch.ones_like(lse) if token_weight is None else token_weight
    target_log_prob = log_prob.gather(1, label[:, None])[:, 0]
    if token_scaling:
        token_factor = token_factor * target_log_prob.detach().exp()
    token_factor = torch.where(valid, token_factor, 0.0)

    token_loss = -(1 - label_smoothing) * column_weight[label] * target_log_prob
    if label_smoothing:  # 0 times the logarithm of a probability of 0 is nan
        token_loss = token_loss - (label_smoothing / vocab_size) * (log_prob * column_weight).sum(-1)
    cross_entropy = torch.where(valid, token_factor * token_loss, 0.0)
    z_part = torch.where(valid, token_factor * z_loss * lse.square(), 0.0)

    num_valid = valid.sum()
    if reduction == "none":
        loss, z_out = cross_entropy + z_part, z_part
    elif reduction == "sum":
        loss, z_out = cross_entropy.sum() + z_part.sum(), z_part.sum()
    elif num_valid == 0:
        # 0 where F.cross_entropy has nan; the products keep the graph, so the gradients are zeros.
        loss, z_out = cross_entropy.sum(), z_part.sum()
    else:
        by = torch.where(valid, column_weight[label], 0.0).sum() if normalizer is None else normalizer
        z_by = num_valid if normalizer is None else normalizer
        loss, z_out = cross_entropy.sum() / by + z_part.sum() / z_by, z_part.sum() / z_by

    with torch.no_grad():
        predictions = logits.argmax(-1)
        correct = (valid & (predictions == target)).sum()
        aux = {
            "z_loss": z_out.detach(),
            "lse": lse.detach(),
            "accuracy": correct / num_valid.clamp(min=1),
            "predictions": predictions,
            "entropy": -(log_prob.exp() * log_prob).sum(-1),
            "num_valid": num_valid,
        }
    return loss, aux


def reference(
    hidden: Tensor, weight: Tensor, target: Tensor, *, upstream: Tensor | None = None, **options: Any
) -> Reference:
    """Loss, gradients and aux in float64; inputs of any dtype and leading shape; `upstream` is the loss's gradient."""
    lead = target.shape
    hidden_64 = hidden.detach().double().reshape(-1, hidden.shape[-1]).requires_grad_()
    weight_64 = weight.detach().double().requires_grad_()
    for name in ("bias", "class_weight", "token_weight"):
        if options.get(name) is not None:
            options[name] = options[name].detach().double()
    if options.get("token_weight") is not None:
        options["token_weight"] = options["token_weight"].reshape(-1)
    bias = options.get("bias")
    if bias is not None:
        bias.requires_grad_()
    loss, aux = loss_and_aux(hidden_64, weight_64, target.reshape(-1), **options)
    flat = torch.ones_like(loss) if upstream is None else upstream.detach().double().reshape(loss.shape)
    inputs = [hidden_64, weight_64] + ([] if bias is None else [bias])
    grads = torch.autograd.grad(loss, inputs, flat)
    per_token = options.get("reduction") == "none"
    shaped = {
        name: value.reshape(lead) if value.ndim == 1 and value.shape == (target.numel(),) else value
        for name, value in aux.items()
    }
    return Reference(
        loss.detach().reshape(lead) if per_token else loss.detach(),
        grads[0].reshape(hidden.shape),
        grads[1],
        grads[2] if bias is not None else None,
        shaped,
    )
