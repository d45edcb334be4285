"""FlceParallel: the style of `parallelize_module` that shards a head and lets it compute the loss."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from flce_dist import VocabParallelHead
from flce_dist.attach import attach_loss
from flce_dist.integrations.fsdp import FlceParallel
from tests.kit import compare, oracle
from tests.kit.fsdp import BFLOAT16, Cell, full, judge, train
from tests.kit.fsdp_matrix import name
from tests.kit.trace import Trace
from tests.kit.workers import Context, Pool
from tests.test_checks_ranks import assert_all_raise

H = 8
OPTIONS: dict[str, Any] = {"chunk_rows": 5, "z_loss": 1e-3, "softcap": 6.0}


@pytest.mark.parametrize(
    "cell",
    [
        Cell("tp", "own", dtype, vocab_size, world, head, bias, sequence_parallel=sequence_parallel)
        for dtype, vocab_size, world, head, bias, sequence_parallel in (
            (torch.float32, 64, 2, "linear", True, False),
            (torch.float32, 65, 4, "module", False, False),
            (torch.float32, 9, 4, "linear", True, True),  # the last rank has no rows
            (torch.float32, 65, 2, "module", True, True),
            (BFLOAT16, 9, 4, "module", False, False),
            (BFLOAT16, 65, 4, "linear", False, True),
        )
    ]
    + [Cell("tp", "tied", vocab_size=65, world=4), Cell("tp", "tied", vocab_size=65, sequence_parallel=True)],
    ids=name,
)
def test_with_the_stock_plan_of_the_body(cell: Cell, workers: Pool) -> None:
    judge(cell, workers.run(cell.world, train, cell))


def make_head(kind: str, vocab_size: int, bias: bool, options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    if kind == "module":
        return VocabParallelHead(H, vocab_size, bias=bias, **options)
    return nn.Linear(H, vocab_size, bias=bias)


def make_data(vocab_size: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, length, H, generator=generator)
    target = torch.randint(vocab_size, (2, length), generator=generator)
    target[0, 0] = -100
    return hidden, target, torch.rand(2, length, generator=generator) + 0.5


class Net(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.lm_head = head

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.lm_head(*arguments, **keywords)


def styled(kind: str, mesh: DeviceMesh, layout: Placement, rows: int, bias: bool, **style: Any) -> nn.Module:
    head = make_head(kind, rows, bias, OPTIONS if kind == "module" else {})
    options = {} if kind == "module" else OPTIONS
    net = parallelize_module(Net(head), mesh, {"lm_head": FlceParallel(input_layouts=layout, **options, **style)})
    return net.lm_head


def _head_alone(
    ctx: Context, kind: str, dim: int | None, vocab_size: int, length: int, bias: bool, dtensor: bool, reduction: str
) -> dict[str, Any]:
    mesh = DeviceMesh.from_group(ctx.group, "cpu")
    layout: Placement = Replicate() if dim is None else Shard(dim)
    if reduction == "none":
        OPTIONS["reduction"] = "none"
    try:
        head = styled(kind, mesh, layout, vocab_size, bias)
    finally:
        OPTIONS.pop("reduction", None)
    hidden, target, token_weight = make_data(vocab_size, length)
    placed = distribute_tensor(hidden, mesh, [layout])
    given = (placed if dtensor else placed.to_local()).detach().requires_grad_()
    if dtensor:
        whole = [distribute_tensor(tensor, mesh, [Replicate()]) for tensor in (target, token_weight)]
        output = head(given, whole[0], token_weight=whole[1])
    else:
        output = head(given, target, token_weight=token_weight)
    upstream = torch.linspace(1.0, 2.0, target.numel()).reshape(target.shape)
    if reduction == "none":
        output.backward(distribute_tensor(upstream, mesh, [layout]).to_local())
    else:
        (output * 1.7).backward()
    grads = {key: full(p.grad).detach() for key, p in head.named_parameters() if p.grad is not None}
    hidden_grad = given.grad
    assert hidden_grad is not None
    if not dtensor:
        hidden_grad = DTensor.from_local(hidden_grad, mesh, [layout], shape=hidden.shape, stride=hidden.stride())
    loss = output.detach()
    if reduction == "none":
        loss = DTensor.from_local(loss, mesh, [layout], shape=target.shape, stride=target.stride()).full_tensor()
    return {"loss": loss, "hidden": full(hidden_grad), **grads}


@pytest.mark.parametrize(
    ("kind", "dim", "vocab_size", "length", "bias", "dtensor", "reduction"),
    [
        ("linear", None, 21, 7, True, False, "mean"),
        ("linear", None, 21, 7, False, True, "none"),
        ("module", None, 21, 7, True, True, "mean"),
        ("linear", 1, 21, 7, True, True, "mean"),  # the last rank has fewer tokens
        ("linear", 1, 21, 7, True, False, "none"),
        ("module", 1, 21, 7, False, False, "mean"),
        ("module", 1, 21, 2, True, True, "mean"),  # ranks without tokens
        ("linear", 1, 4, 5, True, True, "none"),  # ... and a rank without tokens or rows
        ("linear", 0, 21, 7, True, True, "mean"),
    ],
)
def test_loss_and_gradients(
    kind: str, dim: int | None, vocab_size: int, length: int, bias: bool, dtensor: bool, reduction: str, workers: Pool
) -> None:
    head = make_head("linear", vocab_size, bias, {})
    hidden, target, token_weight = make_data(vocab_size, length)
    upstream = torch.linspace(1.0, 2.0, target.numel()).reshape(target.shape)
    expected = oracle.reference(
        hidden,
        head.weight.detach(),
        target,
        bias=head.bias.detach() if bias else None,
        token_weight=token_weight,
        reduction=reduction,
        upstream=upstream if reduction == "none" else torch.tensor(1.7),
        z_loss=1e-3,
        softcap=6.0,
    )
    for found in workers.run(3, _head_alone, kind, dim, vocab_size, length, bias, dtensor, reduction):
        compare.assert_loss(found["loss"], expected.loss, 1e-5)
        compare.assert_close(found["hidden"], expected.hidden_grad, 1e-5, "hidden gradient")
        compare.assert_close(found["weight"], expected.weight_grad, 1e-5, "weight gradient")
        if bias:
            compare.assert_close(found["bias"], expected.bias_grad, 1e-5, "bias gradient")


def _padded_below_fsdp2(ctx: Context) -> Tensor:
    """12 rows of which 9 are the vocabulary; the last rank has padding alone."""
    mesh = DeviceMesh.from_group(
        [ctx.groups[(ctx.rank,)], ctx.group], "cpu", mesh=torch.arange(4).reshape(1, 4), mesh_dim_names=("dp", "tp")
    )
    head = styled("linear", mesh["tp"], Replicate(), 12, False, vocab_size=9)
    fully_shard(head, mesh=mesh["dp"])
    hidden, target, _ = make_data(9, 7)
    head(hidden, target).backward()
    assert head.weight.grad is not None
    return full(head.weight.grad)


def test_a_padded_head_below_fsdp2(workers: Pool) -> None:
    weight = make_head("linear", 12, False, {}).weight.detach()
    hidden, target, _ = make_data(9, 7)
    expected = oracle.reference(hidden, weight[:9], target, z_loss=1e-3, softcap=6.0)
    for grad in workers.run(4, _padded_below_fsdp2):
        compare.assert_close(grad[:9], expected.weight_grad, 1e-5, "weight gradient")
        compare.assert_exactly_zero(grad[9:], "gradient of padding")


def _traffic(ctx: Context, how: str) -> tuple[Counter[str], Counter[str], int]:
    """Collectives of a step of the head and their bytes a rank brings in, and the bytes of the largest allocation."""
    mesh = DeviceMesh.from_group(ctx.group, "cpu")
    in_loss = how == "in the loss"
    net = nn.Linear(64, 96, bias=False)
    style = FlceParallel(input_layouts=Shard(1) if in_loss else Replicate(), chunk_rows=16, check_ranks="never")
    head = parallelize_module(net, mesh, style)
    target = torch.randint(96, (1, 128), generator=torch.Generator().manual_seed(0))
    hidden = distribute_tensor(torch.randn(1, 128, 64), mesh, [Shard(1)]).requires_grad_()
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    with Trace() as trace:
        given = hidden if in_loss else _Gather.apply(hidden.to_local(), ctx.group)
        head(given, target).backward()
    for event in trace.events:
        if event.is_collective:
            counts[event.name] += 1
            sizes[event.name] += torch.Size(event.shapes[-1]).numel() * event.dtypes[-1].itemsize
    return counts, sizes, trace.largest_allocation[0]


class _Gather(torch.autograd.Function):
    """Hidden states `[1, n, H]` of all ranks at once; the gradient is complete on each and its own part is taken."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Any) -> Tensor:
        ctx.rank, ctx.length = torch.distributed.get_rank(group), hidden.shape[1]
        whole = hidden.new_empty(1, hidden.shape[1] * torch.distributed.get_world_size(group), hidden.shape[2])
        torch.distributed.all_gather_into_tensor(whole.view(-1), hidden.contiguous().view(-1), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[:, ctx.rank * ctx.length :][:, : ctx.length], None


def test_sequence_parallel_hidden_states_are_gathered_inside_the_loss(workers: Pool) -> None:
    """Beside gathering them before it: half the traffic of gradients, and no rank holds the whole."""
    tokens, hidden_bytes, chunks = 128, 64 * 4, 8
    for counts, sizes, largest in workers.run(2, _traffic, "in the loss"):
        # Hidden states and statistics of each chunk, and the targets once.
        assert counts == {"all_gather": 2 * chunks + 1, "reduce_scatter": chunks}
        assert sizes["all_gather"] == tokens // 2 * hidden_bytes + tokens * 4 * 4 + tokens // 2 * 8
        assert sizes["reduce_scatter"] == tokens * hidden_bytes
        assert largest < tokens * hidden_bytes
    for counts, sizes, largest in workers.run(2, _traffic, "before it"):
        assert counts == {"all_gather": chunks + 1, "all_reduce": chunks}
        assert sizes["all_gather"] == tokens // 2 * hidden_bytes + tokens * 4 * 4
        # An all-reduce moves twice the bytes of a reduce-scatter of its size.
        assert sizes["all_reduce"] == tokens * hidden_bytes
        assert largest >= tokens * hidden_bytes


def _logits(ctx: Context, kind: str, layout: Placement, dtensor: bool) -> Tensor:
    mesh = DeviceMesh.from_group(ctx.group, "cpu")
    head = styled(kind, mesh, layout, 21, True)
    hidden = distribute_tensor(make_data(21, 7)[0], mesh, [layout]).requires_grad_()
    logits = head(hidden if dtensor else hidden.to_local())
    if kind == "linear":
        assert isinstance(logits, DTensor)
        assert logits.placements == (Shard(2),)
        full = logits.full_tensor()
        full.square().sum().backward()
        assert isinstance(hidden.grad, DTensor)
        expected = 2.0 * full.detach() @ head.weight.full_tensor().detach()
        torch.testing.assert_close(hidden.grad.full_tensor(), expected)
        return full.detach()
    shape = torch.Size((2, 7, 21))
    return DTensor.from_local(logits, mesh, [Shard(2)], shape=shape, stride=(147, 21, 1)).full_tensor().detach()


@pytest.mark.parametrize(
    ("kind", "layout", "dtensor"),
    [
        ("linear", Replicate(), False),
        ("linear", Replicate(), True),
        ("linear", Shard(1), True),
        ("module", Replicate(), False),
        ("module", Replicate(), True),
    ],
)
def test_logits_without_a_target(kind: str, layout: Placement, dtensor: bool, workers: Pool) -> None:
    expected = make_head("linear", 21, True, {})(make_data(21, 7)[0])
    if kind == "module":
        expected = 6.0 * torch.tanh(expected / 6.0)
    for logits in workers.run(2, _logits, kind, layout, dtensor):
        torch.testing.assert_close(logits, expected.detach())


@pytest.mark.parametrize(
    ("kind", "words"),
    [("linear", "leave use_local_output=False"), ("module", "logits of token-sharded hidden states")],
)
def test_logits_of_plain_sequence_parallel_hidden_states_are_refused(kind: str, words: str, workers: Pool) -> None:
    assert_all_raise(workers.outcomes(2, _logits, kind, Shard(1), False), "NotImplementedError", words)


def _compiled(ctx: Context, kind: str, dim: int | None) -> list[tuple[Tensor, Tensor]]:
    """Two lengths, so that the second graph has dynamic shapes."""
    torch.compiler.reset()
    mesh = DeviceMesh.from_group(ctx.group, "cpu")
    layout: Placement = Replicate() if dim is None else Shard(dim)
    net: Any = Net(styled(kind, mesh, layout, 21, True))
    net.compile(backend="aot_eager", fullgraph=True)
    found = []
    for length in (6, 8):
        hidden, target, _ = make_data(21, length)
        given = distribute_tensor(hidden, mesh, [layout]).to_local().requires_grad_()
        net.zero_grad()
        loss = net(given, target)
        loss.backward()
        found.append((loss.detach(), full(net.lm_head.weight.grad)))
    return found


@pytest.mark.parametrize("dim", [None, 1])
@pytest.mark.parametrize("kind", ["linear", "module"])
def test_the_head_compiles_into_one_graph(kind: str, dim: int | None, workers: Pool) -> None:
    head = make_head("linear", 21, True, {})
    weight, bias = head.weight.detach(), head.bias.detach()
    for found in workers.run(2, _compiled, kind, dim):
        for length, (loss, grad) in zip((6, 8), found, strict=True):
            hidden, target, _ = make_data(21, length)
            expected = oracle.reference(hidden, weight, target, bias=bias, z_loss=1e-3, softcap=6.0)
            compare.assert_loss(loss, expected.loss, 1e-5)
            compare.assert_close(grad, expected.weight_grad, 1e-5, "weight gradient")


def _logits_by_name(ctx: Context) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(H, 21)
    hidden, *_ = make_data(21, 6)
    expected = head(hidden)
    parallelize_module(head, DeviceMesh.from_group(ctx.group, "cpu"), FlceParallel())
    return head(input=hidden).full_tensor().detach(), expected.detach()


def test_logits_of_hidden_states_by_the_name_that_a_linear_layer_gives_them(workers: Pool) -> None:
    for logits, expected in workers.run(2, _logits_by_name):
        torch.testing.assert_close(logits, expected)


def _frozen(ctx: Context) -> bool:
    head = nn.Linear(H, 21).requires_grad_(False)
    parallelize_module(head, DeviceMesh.from_group(ctx.group, "cpu"), FlceParallel())
    return any(parameter.requires_grad for parameter in head.parameters())


def test_a_frozen_head_stays_frozen(workers: Pool) -> None:
    assert workers.run(2, _frozen) == [False, False]


def _wrong(ctx: Context, what: str) -> None:
    mesh = DeviceMesh.from_group(ctx.group, "cpu")
    hidden, target, _ = make_data(21, 6)
    if what == "embedding":
        parallelize_module(nn.Embedding(21, H), mesh, FlceParallel())
    elif what == "options of a module":
        parallelize_module(VocabParallelHead(H, 21), mesh, FlceParallel(z_loss=1e-3))
    elif what == "a loss already":
        head = nn.Linear(H, 21)
        attach_loss(head, z_loss=1e-3)
        parallelize_module(head, mesh, FlceParallel())
    elif what == "sharded hidden, replicated style":
        styled("linear", mesh, Replicate(), 21, True)(distribute_tensor(hidden, mesh, [Shard(1)]), target)
    elif what == "partial hidden":
        styled("module", mesh, Replicate(), 21, True)(DTensor.from_local(hidden, mesh, [Partial()]), target)
    elif what == "part of the targets":
        styled("linear", mesh, Shard(1), 21, True)(hidden[:, :3], target[:, :3])
    elif what == "flat tokens":
        styled("linear", mesh, Shard(1), 21, True)(hidden.flatten(0, 1), target.flatten())
    elif what == "too many arguments":
        styled("linear", mesh, Replicate(), 21, True)(hidden, target, target)
    elif what == "no arguments":
        styled("module", mesh, Replicate(), 21, True)()


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("embedding", "TypeError", "nn.Linear"),
        ("options of a module", "ValueError", "has its own options"),
        ("a loss already", "TypeError", "another forward than its class"),
        ("sharded hidden, replicated style", "ValueError", "input_layouts"),
        ("partial hidden", "ValueError", "input_layouts"),
        ("part of the targets", "ValueError", "leading dimensions"),
        ("flat tokens", "ValueError", "dimensions"),
        ("too many arguments", "TypeError", "argument"),
        ("no arguments", "TypeError", "hidden"),
    ],
)
def test_what_is_refused_on_all_ranks(what: str, error: str, words: str, workers: Pool) -> None:
    assert_all_raise(workers.outcomes(2, _wrong, what), error, words)


@pytest.mark.parametrize("layout", [Partial(), Shard(-1)])
def test_layouts_that_no_hidden_states_have(layout: Placement) -> None:
    with pytest.raises(ValueError, match="input_layouts"):
        FlceParallel(input_layouts=layout)


def test_options_are_checked_when_the_style_is_made() -> None:
    with pytest.raises(ValueError, match="label_smoothing"):
        FlceParallel(label_smoothing=2.0)


def _two_dimensional(ctx: Context) -> None:
    parallelize_module(nn.Linear(H, 21), ctx.mesh(2, 2, names=("dp", "tp")), FlceParallel())


def test_a_mesh_of_two_dimensions_is_refused(workers: Pool) -> None:
    assert_all_raise(workers.outcomes(4, _two_dimensional), "ValueError", "1-D mesh", "tp")
