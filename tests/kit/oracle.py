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
    """Loss (0-d, or [N] for "none"), gradients of the full inputs, and the auxiliary outputs by name.

    The `terms` are the norms of the gradients with every term of their sums taken absolute and weighted by the size
    of the logit it stems from: rounding of the working precision is seen against these where terms cancel.
    """

    loss: Tensor
    hidden_grad: Tensor
    weight_grad: Tensor
    bias_grad: Tensor | None
    aux: dict[str, Tensor] = field(default_factory=dict)
    hidden_terms: float = 0.0
    weight_terms: float = 0.0
    bias_terms: float = 0.0


def scaled_logits(products: Tensor, bias: Tensor | None, softcap: float | None, logit_scale: float) -> Tensor:
    """Logits [N, V] from hidden @ weight.T."""
    logits = logit_scale * (products if bias is None else products + bias)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


@dataclass
class _Rows:
    """What loss and terms share, per token: [N], [N, V] or [V]."""

    logits: Tensor
    lse: Tensor
    valid: Tensor
    label: Tensor
    column_weight: Tensor
    factor: Tensor
    divisor: Tensor | float
    z_divisor: Tensor | float


def _rows(products: Tensor, target: Tensor, o: dict[str, Any]) -> _Rows:
    logits = scaled_logits(products, o.get("bias"), o.get("softcap"), o.get("logit_scale", 1.0))
    lse = torch.logsumexp(logits, dim=-1)
    valid = target != o.get("ignore_index", -100)
    label = torch.where(valid, target, 0).long()
    column_weight = o.get("class_weight")
    if column_weight is None:
        column_weight = torch.ones(products.shape[1], dtype=logits.dtype)
    factor = torch.ones_like(lse) if o.get("token_weight") is None else o["token_weight"]
    if o.get("token_scaling"):
        factor = factor * (logits.gather(1, label[:, None])[:, 0] - lse).detach().exp()
    factor = torch.where(valid, factor, 0.0)
    divisor: Tensor | float = 1.0
    z_divisor: Tensor | float = 1.0
    # Where nothing is valid the mean is 0 (F.cross_entropy has nan); the products keep the graph.
    if o.get("reduction", "mean") == "mean" and valid.any():
        divisor = torch.where(valid, column_weight[label], 0.0).sum()
        z_divisor = valid.sum()
        if o.get("normalizer") is not None:
            divisor = z_divisor = o["normalizer"]
    return _Rows(logits, lse, valid, label, column_weight, factor, divisor, z_divisor)


def loss_and_aux(products: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The differentiable float64 loss, and what `aux` can name, of products = hidden @ weight.T [N, V] in float64.

    Options by the names of the package: bias, class_weight, token_weight, normalizer, reduction, ignore_index,
    label_smoothing, z_loss, token_scaling, softcap, logit_scale.
    """
    r = _rows(products, target, options)
    smoothing, num_valid = options.get("label_smoothing", 0.0), r.valid.sum()
    log_prob = r.logits - r.lse[:, None]
    token_loss = -(1 - smoothing) * r.column_weight[r.label] * log_prob.gather(1, r.label[:, None])[:, 0]
    if smoothing:  # 0 times the logarithm of a probability of 0 is nan
        token_loss = token_loss - (smoothing / products.shape[1]) * (log_prob * r.column_weight).sum(-1)
    cross_entropy = torch.where(r.valid, r.factor * token_loss, 0.0) / r.divisor
    z_part = torch.where(r.valid, r.factor * options.get("z_loss", 0.0) * r.lse.square(), 0.0) / r.z_divisor
    if options.get("reduction") != "none":
        cross_entropy, z_part = cross_entropy.sum(), z_part.sum()
    with torch.no_grad():
        predictions = r.logits.argmax(-1)
        correct = (r.valid & (predictions == target)).sum()
        aux = {
            "z_loss": z_part.detach(),
            "lse": r.lse.detach(),
            "accuracy": correct / num_valid.clamp(min=1),
            "predictions": predictions,
            "entropy": -(log_prob.exp() * log_prob).sum(-1),
            "num_valid": num_valid,
        }
    return cross_entropy + z_part, aux


@torch.no_grad()
def _term_sizes(products: Tensor, target: Tensor, upstream: Tensor, options: dict[str, Any]) -> Tensor:
    """Sizes [N, V] of the terms that make up the gradient of `products`; see Reference."""
    r = _rows(products, target, options)
    smoothing, scale = options.get("label_smoothing", 0.0), options.get("logit_scale", 1.0)
    weight = upstream.abs() * r.factor / r.divisor
    of_target = weight * (1 - smoothing) * r.column_weight[r.label]
    uniform = weight * smoothing / products.shape[1]
    square = upstream.abs() * r.factor / r.z_divisor * 2 * options.get("z_loss", 0.0) * r.lse.abs()
    p = torch.exp(r.logits - r.lse[:, None])
    sizes = (of_target + uniform * r.column_weight.sum() + square)[:, None] * p + uniform[:, None] * r.column_weight
    sizes.scatter_add_(1, r.label[:, None], of_target[:, None])
    return sizes * abs(scale) * (1 + r.logits.abs().amax(-1, keepdim=True))


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
    products = hidden_64 @ weight_64.T
    loss, aux = loss_and_aux(products, target.reshape(-1), **options)
    flat = torch.ones_like(loss) if upstream is None else upstream.detach().double().reshape(loss.shape)
    inputs = [hidden_64, weight_64] + ([] if bias is None else [bias])
    grads = torch.autograd.grad(loss, inputs, flat)
    per_token = options.get("reduction") == "none"
    shaped = {
        name: value.reshape(lead) if value.ndim == 1 and value.shape == (target.numel(),) else value
        for name, value in aux.items()
    }
    sizes = _term_sizes(products.detach(), target.reshape(-1), flat, options)
    return Reference(
        loss.detach().reshape(lead) if per_token else loss.detach(),
        grads[0].reshape(hidden.shape),
        grads[1],
        grads[2] if bias is not None else None,
        shaped,
        hidden_terms=(sizes @ weight_64.detach().abs()).norm().item(),
        weight_terms=(sizes.T @ hidden_64.detach().abs()).norm().item(),
        bias_terms=sizes.sum(0).norm().item(),
    )
