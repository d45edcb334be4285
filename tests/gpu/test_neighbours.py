"""Cases of other projects' suites whose sizes need a GPU; `tests/neighbours` has the rest, and says whose they are."""

from typing import Any

import pytest
import torch

from tests.kit.compare import relative_error
from tests.neighbours.support import FLOAT32_LOGITS, LIGER_OPTIONS, LIGER_TOLERANCE, Inputs, compare, ids, plain, run

pytestmark = pytest.mark.gpu


def inputs_on(
    device: torch.device,
    lead: tuple[int, ...],
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype,
    bound: float | None,
) -> Inputs:
    """Standard normal numbers, or uniform ones up to `bound` of either sign, drawn on the device."""
    torch.manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        if bound is None:
            return torch.randn(shape, device=device).to(dtype)
        return torch.empty(shape, device=device).uniform_(-bound, bound).to(dtype)

    return Inputs(draw(*lead, hidden_size), draw(vocab_size, hidden_size), ids(vocab_size, lead, 3).to(device))


@pytest.mark.parametrize("length", [512, 1024])
@pytest.mark.parametrize("hidden_size", [1024, 2048])
@pytest.mark.parametrize("vocab_size", [32000, 100000])
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}, {"logit_scale": 0.5}], ids=str)
def test_fla(device: torch.device, length: int, hidden_size: int, vocab_size: int, options: dict[str, Any]) -> None:
    """Logits of a spread up to 45, bias, the last token of each sequence ignored, accumulation in both dtypes."""
    inputs = inputs_on(device, (2 * length,), hidden_size, vocab_size, torch.bfloat16, None)
    inputs.bias = torch.randn(vocab_size, device=device).bfloat16()
    inputs.target[length - 1 :: length] = -100
    reference = plain(inputs, -1.3, **options)
    for accum_dtype in (None, torch.float32):
        got = run(None, inputs, -1.3, accum_dtype=accum_dtype, **options)
        for name in ("loss", "hidden", "weight", "bias"):
            assert relative_error(getattr(got, name), getattr(reference, name)) <= 1e-2, name


@pytest.mark.parametrize(
    "problem",
    [((80,), 152064, 64), ((1024,), 152064, 4096), ((4096,), 152063, 8192), ((2, 4096), 152064, 8192)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_megatron(
    device: torch.device, problem: tuple[tuple[int, ...], int, int], dtype: torch.dtype, reduction: str
) -> None:
    lead, vocab_size, hidden_size = problem
    inputs = inputs_on(device, lead, hidden_size, vocab_size, dtype, 0.1)
    upstream = torch.rand(lead if reduction == "none" else (), device=device) * 0.2 - 0.1
    got = run(None, inputs, upstream, reduction=reduction, **FLOAT32_LOGITS)
    expected = plain(inputs, upstream, torch.float32, reduction=reduction)
    compare([got], expected, {}, {"atol": 1e-3, "rtol": 1e-3})


@pytest.mark.parametrize(("reduction", "dtype"), LIGER_TOLERANCE, ids=str)
@pytest.mark.parametrize("name", LIGER_OPTIONS)
def test_liger(device: torch.device, reduction: str, dtype: torch.dtype, name: str) -> None:
    """(8, 128, 1024, 4096) with weights in [0, 1), so that logits of a row have a common offset of up to 100."""
    inputs = inputs_on(device, (1024,), 1024, 4096, dtype, None)
    inputs.weight = torch.rand(4096, 1024, device=device).to(dtype)
    inputs.target[::3] = 42
    options = LIGER_OPTIONS[name]
    weight = {"weight": torch.rand(4096, device=device)} if name == "all" else {}
    expected = plain(inputs, reduction=reduction, **options, **weight)
    ours = {"class_weight": weight["weight"], "accum_dtype": torch.float32} if weight else {}
    got = run(None, inputs, reduction=reduction, **options, **ours)
    tolerance = LIGER_TOLERANCE[reduction, dtype]
    compare([got], expected, tolerance, tolerance)


@pytest.mark.parametrize("problem", [(1530, 2048, 32256), (1388, 4096, 102400)], ids=str)
def test_verl(device: torch.device, problem: tuple[int, int, int]) -> None:
    """Temperature 1.5; the entropy's value beside the log probabilities."""
    num_tokens, hidden_size, vocab_size = problem
    inputs = inputs_on(device, (1, num_tokens), hidden_size, vocab_size, torch.bfloat16, 0.5)
    upstream = torch.rand(1, num_tokens, device=device) * 2 - 1
    options = {"reduction": "none", "logit_scale": 1 / 1.5}
    got = run(None, inputs, upstream, aux=("entropy",), **options, **FLOAT32_LOGITS)
    expected = plain(inputs, upstream, torch.float32, **options)
    compare([got], expected, {"atol": 1e-4, "rtol": 1e-4}, {"atol": 1e-2, "rtol": 1e-4})
    log_prob = (inputs.hidden[0].float() @ inputs.weight.float().T / 1.5).log_softmax(-1)
    entropy = -(log_prob.exp() * log_prob).sum(-1)
    torch.testing.assert_close(got.aux["entropy"][0], entropy, atol=1e-4, rtol=1e-4)
