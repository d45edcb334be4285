"""apply() on GPUs, beside the stock loss: values, synchronisation, assertions, memory, Trainer; two GPUs."""

import copy
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.support import DevicePool, free_memory
from tests.kit.skips import needs
from tests.kit.workers import Context

transformers = pytest.importorskip("transformers", reason=needs("hf"))

from flce_dist.integrations.transformers import UnsupportedForward, apply, apply_to_trainer  # noqa: E402
from flce_dist.integrations.transformers.verify import HOST_CHECKS  # noqa: E402
from tests.kit.causal_lm import tiny, whole  # noqa: E402

pytestmark = pytest.mark.gpu

VOCAB = 1001  # uneven over two GPUs
KINDS: dict[str, dict[str, Any]] = {"Llama": {}, "Gemma2": {"head_dim": 8, "final_logit_softcapping": 0.5}}


def make(kind: str, device: torch.device, dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    values = {"vocab_size": VOCAB, "tie_word_embeddings": False, **KINDS[kind], **sizes}
    return tiny(kind, **values).to(device, dtype)


def batch(device: torch.device, shape: tuple[int, int] = (3, 65), vocab: int = VOCAB) -> dict[str, Tensor]:
    ids = torch.randint(vocab, shape, generator=torch.Generator().manual_seed(0))
    labels = torch.where(ids % 5 == 0, -100, ids)
    inputs = {"input_ids": ids, "labels": labels, "num_items_in_batch": (labels[:, 1:] != -100).sum()}
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def loss_and_grads(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach().double(), {name: whole(p.grad).double() for name, p in model.named_parameters()}


def errors(grads: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative, by the norm of each parameter's gradient."""
    assert grads.keys() == expected.keys()
    return {name: float((grads[name] - grad).norm() / grad.norm()) for name, grad in expected.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_in_fp32_are_the_stock_ones(kind: str, device: torch.device) -> None:
    model, inputs = make(kind, device), batch(device)
    loss, grads = loss_and_grads(model, inputs)
    apply(model, chunk_rows=50)
    for _ in range(HOST_CHECKS + 1):
        ours, our_grads = loss_and_grads(model, inputs)
        torch.testing.assert_close(ours, loss, rtol=1e-5, atol=0)
        assert max(errors(our_grads, grads).values()) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_in_bf16_are_as_near_to_fp32_as_stock(kind: str, device: torch.device) -> None:
    model, inputs = make(kind, device, torch.bfloat16), batch(device)
    loss, grads = loss_and_grads(copy.deepcopy(model).float(), inputs)
    stock, stock_grads = loss_and_grads(model, inputs)
    apply(model, chunk_rows=50)
    ours, our_grads = loss_and_grads(model, inputs)
    assert (ours - loss).abs() <= 2 * (stock - loss).abs() + 1e-3 * loss
    allowed = errors(stock_grads, grads)
    for name, error in errors(our_grads, grads).items():
        assert error <= 2 * allowed[name] + 5e-3, f"{name}: {error:.2e}, stock {allowed[name]:.2e}"


def synchronisations(step: Callable[[], Any]) -> int:
    """How often the host waits for the GPU in one call."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing CUDA operation" in str(each.message) for each in found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_the_host_does_not_wait_after_the_first_calls(kind: str, training: bool, device: torch.device) -> None:
    model, inputs = make(kind, device).train(training), batch(device)

    def step() -> None:
        loss = model(**inputs).loss
        if training:
            loss.backward()

    step()
    stock = synchronisations(step)
    apply(model)
    for _ in range(HOST_CHECKS):
        step()
    assert synchronisations(step) <= stock
    assert synchronisations(step) <= stock
    torch.cuda.synchronize()  # the assertions of these steps held


def test_an_error_of_the_first_calls_leaves_the_device_as_it_was(device: torch.device) -> None:
    model, inputs = make("Gemma2", device), batch(device)
    handle = apply(model, softcap=20.0)
    with pytest.raises(UnsupportedForward, match="another way than was declared"):
        model(**inputs)
    torch.cuda.synchronize()
    handle.remove()
    apply(model)
    assert model(**inputs).loss.isfinite()


def test_a_use_of_the_logits_that_begins_later_is_an_error_of_the_host(device: torch.device) -> None:
    model, inputs = make("Llama", device), batch(device)
    apply(model)
    for _ in range(HOST_CHECKS + 1):
        model(**inputs)
    head_loss = model.loss_function
    model.loss_function = lambda logits, *args, **kwargs: head_loss(logits, *args, **kwargs) + logits.detach().std()
    with pytest.raises(UnsupportedForward, match="uses its logits twice"):
        model(**inputs)
    torch.cuda.synchronize()


LATER = """
    import sys, torch
    from tests.gpu.test_transformers import HOST_CHECKS, apply, batch, make
    device = torch.device("cuda")
    model, inputs = make("Llama", device), batch(device)
    apply(model)
    for _ in range(HOST_CHECKS + 1):
        model(**inputs)
    torch.cuda.synchronize()
    print("changes", flush=True)
    model.lm_head.register_forward_hook(lambda module, args, output: output * 1.5)
    loss = model(**inputs).loss
    torch.cuda.synchronize()
    print("not noticed", loss)
"""


def test_another_factor_that_begins_later_is_a_device_side_assertion() -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", textwrap.dedent(LATER)]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=240, check=False)
    assert run.stdout.strip() == "changes", run.stdout + run.stderr
    assert run.returncode != 0
    assert "device-side assert" in run.stderr


def test_the_peak_without_logits(device: torch.device) -> None:
    """A vocabulary of 32k and 4096 tokens in bf16: stock holds logits, their float32 copy and gradients of both."""
    sizes = {"vocab_size": 32768, "hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4}
    model, inputs = make("Llama", device, torch.bfloat16, **sizes), batch(device, (4, 1024), 32768)

    def extra_peak() -> int:
        loss_and_grads_in_place(model, inputs)
        free_memory()
        before = torch.cuda.memory_allocated()
        loss_and_grads_in_place(model, inputs)
        return torch.cuda.max_memory_allocated() - before

    stock = extra_peak()
    handle = apply(model)
    whole_budget = extra_peak()
    handle.remove()
    apply(model, logits_budget="32MiB")
    small_budget = extra_peak()
    print(f"extra peak: stock {stock:,} B, apply {whole_budget:,} B, with logits_budget=32MiB {small_budget:,} B")
    logits = 4 * 1024 * 32768 * 2
    assert stock > 4 * logits
    assert whole_budget < stock / 2
    assert small_budget < stock / 5


def loss_and_grads_in_place(model: Any, inputs: dict[str, Tensor]) -> None:
    model.zero_grad(set_to_none=False)
    model(**inputs).loss.backward()


def test_a_trainer(tmp_path: Path, device: torch.device) -> None:
    pytest.importorskip("accelerate", reason=needs("hf"))
    from tests.test_hf_trainer import assert_same_history, history, trainer

    histories = []
    for fused in (False, True):
        run = trainer(tmp_path, max_steps=2, use_cpu=False)
        assert run.args.n_gpu >= 1
        run.args._n_gpu = 1  # a Trainer in one process takes all GPUs by DataParallel, which is refused
        if fused:
            apply_to_trainer(run)
        run.train()
        histories.append(history(run))
        assert next(run.model.parameters()).device.type == device.type
    assert_same_history(histories[1], histories[0])


# Two GPUs: the ranks see the same batch where the vocabulary is shared, and another row each where data are.


def _shared_vocabulary(ctx: Context, kind: str) -> tuple[float, float]:
    device = ctx.device
    model, inputs = make(kind, device), batch(device)
    loss, grads = loss_and_grads(model, inputs)
    apply(model, ctx.group, chunk_rows=50)
    ours, our_grads = loss_and_grads(model, inputs)
    return float((ours - loss).abs() / loss), max(errors(our_grads, grads).values())


@pytest.mark.parametrize("kind", KINDS)
def test_two_gpus_share_the_vocabulary(kind: str, two_gpus: DevicePool) -> None:
    for loss_error, grad_error in two_gpus.run(2, _shared_vocabulary, kind):
        assert loss_error < 1e-5
        assert grad_error < 1e-4


def _data_parallel(ctx: Context, how: str, kind: str) -> float:
    """The largest error of a parameter after two steps, beside one process that sees the rows of both ranks."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from flce_dist.integrations.never_gathered import shard_head

    device = ctx.device
    inputs = batch(device, (2, 65))
    model, stock = make(kind, device), make(kind, device)
    mesh = torch.distributed.DeviceMesh.from_group(ctx.group, device.type, mesh_dim_names=("data",))
    wrapped: Any = model
    if how == "never gathered":
        head = shard_head(model, "lm_head", mesh)
        fully_shard(model, mesh=mesh, ignored_params=set(head.parameters()))
    elif how == "fsdp2":
        for module in (*model.model.layers, model.lm_head, model):
            fully_shard(module, mesh=mesh)
    else:
        wrapped = DistributedDataParallel(model, process_group=ctx.group)
    apply(model)
    rows = slice(ctx.rank, ctx.rank + 1)
    mine = inputs | {name: inputs[name][rows] for name in ("input_ids", "labels")}
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, foreach=False) for m in (model, stock)]
    for _ in range(2):
        (wrapped(**mine).loss * ctx.world).backward()
        stock(**inputs).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), stock.parameters(), strict=True)
    return max(float((whole(a.detach()) - b).norm() / b.norm()) for a, b in pairs)


@pytest.mark.parametrize("how", ["ddp", "fsdp2", "never gathered"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_on_two_gpus_are_those_of_one_process(how: str, kind: str, two_gpus: DevicePool) -> None:
    assert max(two_gpus.run(2, _data_parallel, how, kind)) < 1e-4
