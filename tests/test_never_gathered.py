"""A head that data-parallel ranks share and that is never gathered: equal to one process that sees all tokens."""

from __future__ import annotations

import copy
import math
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from flce_dist import VocabParallelHead
from flce_dist.attach import attach_loss
from flce_dist.clip import clip_grad_norm_
from flce_dist.integrations.never_gathered import NeverGatheredHead, shard_head
from tests.kit.compare import assert_close
from tests.kit.data_parallel import Cell, H, Model, V, batch, mesh_of, reference, train, wrap
from tests.kit.skips import needs
from tests.kit.trace import Trace
from tests.kit.workers import Context, Pool

CLIP = 0.3  # below each step's norm
CELLS = [
    Cell("fsdp2", 2),
    Cell("fsdp2", 3, max_norm=CLIP),
    Cell("fsdp2", 4, accumulation=2, max_norm=CLIP),
    Cell("fsdp2", 4, replicas=2, max_norm=CLIP),
    Cell("fsdp2", 4, replicas=2, accumulation=3, max_norm=CLIP),
    Cell("fsdp2", 4, replicas=4, accumulation=2, no_sync=False, clip="ours"),
    Cell("fsdp2", 2, clip="ours", max_norm=CLIP),
    Cell("fsdp2 on all ranks", 4, replicas=2, accumulation=2, clip="ours", max_norm=CLIP),
    Cell("fsdp2", 1, max_norm=CLIP),
    Cell("fsdp1", 2, clip="ours"),
    Cell("fsdp1", 4, replicas=2, accumulation=2, clip="ours", max_norm=CLIP),
    Cell("fsdp1 flat", 3, clip="ours", max_norm=CLIP),
    Cell("ddp", 2, accumulation=2, clip="ours", max_norm=CLIP),
    Cell("ddp", 4, replicas=2, clip="ours", max_norm=CLIP),
    Cell("fsdp2", 2, accumulation=2, max_norm=CLIP, bf16=True),
    Cell("fsdp2", 4, replicas=2, bf16=True, clip="ours"),
    Cell("fsdp1", 2, clip="ours", bf16=True),
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_equals_one_process(cell: Cell, workers: Pool) -> None:
    losses, norms, expected = reference(cell.world, cell.accumulation, cell.max_norm)
    assert min(norms) > CLIP
    results = workers.run(cell.world, train, cell)
    shards = cell.world // cell.replicas
    for rank, found in enumerate(results):
        per_replica = torch.tensor([r["losses"] for r in results[::shards]], dtype=torch.float64).mean(0)
        assert per_replica.tolist() == pytest.approx(losses, rel=cell.bound)
        assert found["norms"] == pytest.approx(norms, rel=cell.bound)
        assert found["norms"] == results[0]["norms"]
        assert set(found["state"]) == set(expected)
        for name, tensor in expected.items():
            moved = tensor - Model().state_dict()[name]  # a wrong gradient must not hide behind the initial values
            assert_close(found["state"][name] - Model().state_dict()[name], moved, cell.bound, name)
        assert found["rows"] == 2 * [min(V, (rank % shards + 1) * -(-V // shards)) - rank % shards * -(-V // shards)]
        assert found["dtypes"] == {str(cell.dtype)}


def step(ctx: Context, kind: str, accumulation: int = 1, sync: bool = False) -> list[tuple[str, int]]:
    """The collectives of one step: their names and the elements of their largest tensor."""
    replicas = 2 if kind == "hybrid" else 1
    mesh = mesh_of(ctx, replicas)
    model = Model(vocab_size=BIG_V)
    if kind == "gathered":
        attach_loss(model.lm_head, chunk_rows=10)
        for module in (*model.layers, model.lm_head):
            fully_shard(module, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    else:
        head = shard_head(model, "lm_head", mesh, chunk_rows=10, check_ranks="never")
        wrapped = wrap(Cell("fsdp2", ctx.world, replicas), model, ctx.group, mesh)
    with Trace() as trace:
        for micro in range(accumulation):
            ids, target = batch(0, micro, 0, BIG_V)  # three tokens on each rank, then four, then five
            if kind != "gathered":
                head.set_requires_gradient_sync(sync or micro == accumulation - 1)
            wrapped(ids, target, **({} if kind == "gathered" else {"max_tokens": 5})).backward()
    return [(e.name, max(torch.Size(s).numel() for s in e.shapes)) for e in trace.events if e.is_collective]


BIG_V = 4096  # a shard of the head is larger than all of the body


def test_no_collective_is_as_large_as_the_weight(workers: Pool) -> None:
    shard = BIG_V // 2 * H
    gathered = workers.run(2, step, "gathered")[0]
    # What FSDP does with a head of its own: weight and bias gathered for forward and backward, gradients scattered.
    assert [name for name, size in gathered if size >= shard] == ["all_gather", "all_gather", "reduce_scatter"]
    calls = workers.run(2, step, "alone")[0]
    assert max(size for _, size in calls) < shard
    body = Counter(call for call in gathered if call[1] < shard)
    rows = 2 * 5  # of the only chunk: max_tokens of each rank
    targets, hidden, statistics = ("all_gather", rows), ("all_gather", rows * H), ("all_gather", 2 * 4 * rows)
    assert Counter(calls) - body == Counter([targets, hidden, statistics, ("reduce_scatter", rows * H)])
    assert not body - Counter(calls)


def test_replicas_reduce_the_shard_once_a_step(workers: Pool) -> None:
    shard = [BIG_V // 2 * H, BIG_V // 2]
    for sync, times in ((False, 1), (True, 3)):
        for calls in workers.run(4, step, "hybrid", 3, sync):
            assert [size for name, size in calls if name == "all_reduce" and size in shard] == times * shard
            assert all(size < shard[1] for name, size in calls if name != "all_reduce")


def moved_and_copied(ctx: Context) -> list[Tensor]:
    """Gradients of a replica's shard: at first, of a copy, and after the dtype was changed and changed back."""
    model = Model()
    head = shard_head(model, "lm_head", mesh_of(ctx, 2))
    ids, target = batch(0, 0, ctx.rank)
    gradients = []
    for prepare in (lambda m: m, copy.deepcopy, lambda m: m.bfloat16().double()):
        model.load_state_dict({name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()})
        model = prepare(model)
        model.zero_grad()
        model(ids, target).backward()
        gradients.append(model.lm_head.weight.grad.to_local())
    assert model.lm_head is not head
    return gradients


def test_replicas_of_a_moved_or_copied_head_still_average(workers: Pool) -> None:
    results = workers.run(4, moved_and_copied)
    for rank, gradients in enumerate(results):
        for gradient, of_the_replica in zip(gradients, results[(rank + 2) % 4], strict=True):
            assert torch.equal(gradient, of_the_replica)
            assert_close(gradient, gradients[0], 1e-12, "gradient")
            assert gradient.any()


def other_ways(ctx: Context, replicas: int, ways: tuple[str, ...]) -> list[tuple[Tensor, Tensor]]:
    """Gradients of a shard and of the embedding: plainly, with recomputation of the whole forward, and compiled."""
    ids, target = batch(0, 0, ctx.rank)
    found = []
    for way in ("plain", *ways):
        model = Model()
        shard_head(model, "lm_head", mesh_of(ctx, replicas))
        if way == "compile":
            loss = torch.compile(model, backend="aot_eager", fullgraph=replicas == 1)(ids, target)
        elif way == "plain":
            loss = model(ids, target)
        else:
            dummy = torch.zeros((), requires_grad=True)  # reentrant recomputation wants an input that requires grad
            loss = checkpoint(lambda _, m=model: m(ids, target), dummy, use_reentrant=way == "reentrant")
        loss.backward()
        found.append((model.lm_head.weight.grad.to_local(), model.embedding.weight.grad))
    return found


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "ways", [("reentrant", "recompute"), pytest.param(("compile",), marks=pytest.mark.exhaustive)], ids=str
)
def test_recomputed_and_compiled_models(replicas: int, ways: tuple[str, ...], workers: Pool) -> None:
    for found in workers.run(2, other_ways, replicas, ways, timeout=200):
        for shard, embedding in found[1:]:
            assert_close(shard, found[0][0], 1e-12, "weight gradient")
            assert_close(embedding, found[0][1], 1e-12, "embedding gradient")


class StockModel(Model):
    """The loss of each token, by torch."""

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        logits = self.lm_head(self.body(ids))
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")


def a_loss_a_token(ctx: Context, replicas: int) -> list[tuple[Tensor, Tensor]]:
    """Gradients from the mean of a rank's own losses: of a head that is never gathered, and of a whole one with torch's
    loss."""
    mesh, grads = mesh_of(ctx, replicas), []
    for model in (Model(), StockModel()):
        if isinstance(model, StockModel):
            fully_shard(model, mesh=mesh)
        else:
            head = shard_head(model, "lm_head", mesh, reduction="none")
            fully_shard(model, mesh=mesh, ignored_params=set(head.parameters()))
        ids, target = batch(0, 0, ctx.rank)
        losses = model(ids, target)
        (losses.sum() / (target != -100).sum()).backward()
        grads.append([p.grad.full_tensor() for p in model.parameters()])  # type: ignore[union-attr]
    return list(zip(*grads, strict=True))


@pytest.mark.parametrize("replicas", [1, 2])
def test_losses_of_tokens_are_averaged_over_ranks_as_by_fsdp(replicas: int, workers: Pool) -> None:
    for pairs in workers.run(4, a_loss_a_token, replicas):
        assert len(pairs) == 9
        for actual, expected in pairs:
            assert_close(actual, expected, 1e-11, "gradient")


def from_linear(ctx: Context) -> tuple[Tensor, Tensor, bool]:
    linear = Model().lm_head.eval()
    head = NeverGatheredHead.from_linear(linear, mesh_of(ctx, 1), z_loss=1e-3)
    assert head.options.z_loss == 1e-3
    return head.weight.full_tensor().detach(), linear.weight.detach(), head.training


def test_from_linear(workers: Pool) -> None:
    for whole, expected, training in workers.run(3, from_linear):
        assert torch.equal(whole, expected)
        assert not training


def evaluate(ctx: Context) -> tuple[float, bool]:
    model = Model()
    head = shard_head(model, "lm_head", mesh_of(ctx, 1))
    wrapped = wrap(Cell(), model, ctx.group, head.weight.device_mesh)
    wrapped.eval()
    with torch.no_grad():
        loss = wrapped(*batch(0, 0, ctx.rank))
    return loss.item(), head.training


def test_evaluation_is_the_loss_of_all_tokens(workers: Pool) -> None:
    model = Model()
    batches = [batch(0, 0, rank) for rank in range(3)]
    logits = torch.cat([model.lm_head(model.body(ids)).flatten(0, 1) for ids, _ in batches])
    expected = nn.functional.cross_entropy(logits, torch.cat([target.flatten() for _, target in batches]))
    assert workers.run(3, evaluate) == [(pytest.approx(expected.item(), rel=1e-12), False)] * 3


def autocast(ctx: Context) -> tuple[Tensor, str]:
    model = Model().float()
    head = shard_head(model, "lm_head", mesh_of(ctx, 1))
    wrapped = wrap(Cell(), model, ctx.group, head.weight.device_mesh)
    with torch.autocast("cpu", torch.bfloat16):
        loss = wrapped(*batch(0, 0, ctx.rank))
    loss.backward()
    return head.weight.grad.full_tensor(), str(head.weight.grad.dtype)


def test_autocast_keeps_fp32_parameters_and_gradients(workers: Pool) -> None:
    model = Model().float()
    batches = [batch(0, 0, rank) for rank in range(2)]
    with torch.autocast("cpu", torch.bfloat16):
        logits = torch.cat([model.lm_head(model.body(ids)).flatten(0, 1) for ids, _ in batches])
    nn.functional.cross_entropy(logits.float(), torch.cat([target.flatten() for _, target in batches])).backward()
    for grad, dtype in workers.run(2, autocast):
        assert dtype == "torch.float32"
        assert_close(grad, model.lm_head.weight.grad, 1e-2, "weight gradient")


def stock_clip(ctx: Context, original: bool) -> None:
    model = Model().float()
    shard_head(model, "lm_head", mesh_of(ctx, 1))
    wrapped = wrap(Cell("fsdp1" if original else "fsdp1 flat"), model, ctx.group, mesh_of(ctx, 1))
    wrapped(*batch(0, 0, ctx.rank)).backward()
    wrapped.clip_grad_norm_(1.0)


@pytest.mark.parametrize("original", [True, False])
def test_the_clipping_of_fsdp1_fails_on_all_ranks(original: bool, workers: Pool) -> None:
    """Its norm would be wrong; that it fails is torch's refusal to add a DTensor to a tensor."""
    assert all(outcome.error is not None for outcome in workers.outcomes(2, stock_clip, original))


def several_meshes(ctx: Context, max_norm: float, norm_type: float) -> tuple[float, Tensor]:
    mesh = ctx.mesh(2, 2, names=("a", "b"))
    model = nn.ParameterList(torch.zeros(4) for _ in range(4))
    places = [None, (mesh["a"], [Shard(0)]), (mesh["b"], [Shard(0)]), (mesh, [Replicate(), Shard(0)])]
    for index, place in enumerate(places):
        grad = torch.arange(4.0) + index
        if place is not None:
            model[index] = nn.Parameter(distribute_tensor(torch.zeros(4), *place))
            grad = distribute_tensor(grad, *place)
        model[index].grad = grad
    norm = clip_grad_norm_(model, max_norm, norm_type)
    grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model]
    return norm.item(), torch.stack(grads)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("max_norm", [3.0, 1000.0, math.inf])
def test_our_clipping_of_gradients_on_several_meshes(max_norm: float, norm_type: float, workers: Pool) -> None:
    expected = nn.Parameter(torch.zeros(4, 4))
    expected.grad = torch.arange(4.0) + torch.arange(4.0)[:, None]
    norm = torch.nn.utils.clip_grad_norm_(expected, max_norm, norm_type).item()
    for found, grads in workers.run(4, several_meshes, max_norm, norm_type):
        assert found == pytest.approx(norm, rel=1e-6)
        torch.testing.assert_close(grads, expected.grad)


def test_a_model_without_gradients_has_norm_0() -> None:
    assert clip_grad_norm_(nn.Linear(2, 2), 1.0).item() == 0


def refused(ctx: Context, what: str) -> None:
    mesh, model = mesh_of(ctx, 1), Model()
    if what == "tied":
        model.embedding.weight = model.lm_head.weight
        shard_head(model, "lm_head", mesh)
    elif what == "no linear":
        shard_head(model, "norm", mesh)
    elif what == "sharded already":
        model.lm_head = VocabParallelHead(H, V, mesh)
        shard_head(model, "lm_head", mesh)
    elif what == "a loss already":
        attach_loss(model.lm_head, z_loss=0.1)
        shard_head(model, "lm_head", mesh)
    elif what == "a scale":
        model.lm_head = VocabParallelHead(H, V, hidden_grad_scale=2.0)
        shard_head(model, "lm_head", mesh)
    elif what == "no mesh":
        NeverGatheredHead(H, V, ctx.group)
    elif what == "three dimensions":
        alone = ctx.groups[(ctx.rank,)]
        ranks, names = torch.arange(ctx.world).reshape(1, 1, -1), ("a", "b", "c")
        cube = DeviceMesh.from_group([alone, alone, ctx.group], "cpu", mesh=ranks, mesh_dim_names=names)
        NeverGatheredHead(H, V, cube)
    elif what == "option":
        shard_head(model, "lm_head", mesh, softcap=-1.0)
    elif what == "tied afterwards":
        head = shard_head(model, "lm_head", mesh)
        head.weight = model.embedding.weight
        head(torch.zeros(2, H, dtype=torch.float64), torch.zeros(2, dtype=torch.int64))
    elif what == "logits":
        shard_head(model, "lm_head", mesh)(torch.zeros(2, H, dtype=torch.float64))
    else:
        shard_head(model, "lm_head", mesh)
        fully_shard(model, mesh=mesh)  # without ignored_params


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "tied",
            "the head's weight is tied (embedding.weight is lm_head.weight): an embedding needs all rows on every rank",
        ),
        ("no linear", "expected norm to be an nn.Linear or an unsharded VocabParallelHead, got LayerNorm"),
        ("sharded already", "unsharded VocabParallelHead"),
        ("a loss already", "lm_head has another forward than its class, set on the instance (by attach_loss?)"),
        ("a scale", "lm_head has hidden_grad_scale=2.0"),
        ("no mesh", "expected the device mesh that FSDP shards over, got ProcessGroup"),
        ("three dimensions", "a 1-D or 2-D mesh, got a mesh of 3 dimensions"),
        ("option", "softcap must be positive"),
        ("tied afterwards", "the never-gathered head's parameter has become a Parameter"),
        ("logits", "logits of token-sharded hidden states"),
        ("FSDP2 was not told", "mesh"),
    ],
)
def test_refused_on_all_ranks(what: str, message: str, workers: Pool) -> None:
    for outcome in workers.outcomes(2, refused, what):
        assert outcome.error is not None
        assert message in outcome.error.message


def options_stay(ctx: Context) -> tuple[bool, float | None, list[str], list[str]]:
    model = Model()
    model.lm_head = VocabParallelHead.from_linear(model.lm_head, softcap=5.0, z_loss=0.1)
    model.lm_head.raw_logits = True
    model._ddp_params_and_buffers_to_ignore = ["norm.bias"]
    names = list(model.state_dict())
    head = shard_head(model, "lm_head", mesh_of(ctx, 1), z_loss=0.2)
    assert list(model.state_dict()) == names
    return head.raw_logits, head.options.softcap, head.options.z_loss, model._ddp_params_and_buffers_to_ignore


def test_an_unsharded_head_keeps_its_options(workers: Pool) -> None:
    ignored = ["lm_head.bias", "lm_head.weight", "norm.bias"]
    assert workers.run(2, options_stay) == [(True, 5.0, 0.2, ignored)] * 2


def causal_lm(ctx: Context) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Stock loss of this rank's batch; the loss and gradients of the same model with a never-gathered head."""
    from flce_dist.integrations.transformers import apply
    from tests.kit.causal_lm import VOCAB, tiny, whole

    mesh, model = mesh_of(ctx, 1), tiny(tie_word_embeddings=False)
    ids = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(ctx.rank))
    stock = model(input_ids=ids, labels=ids).loss
    head = shard_head(model, "lm_head", mesh)
    apply(model)
    fully_shard(model, mesh=mesh, ignored_params=set(head.parameters()))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return stock.detach(), loss.detach(), {name: whole(p.grad).clone() for name, p in model.named_parameters()}


def test_a_causal_lm_of_transformers(workers: Pool) -> None:
    pytest.importorskip("transformers", reason=needs("hf"))
    from tests.kit.causal_lm import VOCAB, tiny

    model = tiny(tie_word_embeddings=False)
    ids = torch.cat([torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(rank)) for rank in range(3)])
    model(input_ids=ids, labels=ids).loss.backward()
    results = workers.run(3, causal_lm)
    stock = torch.stack([stock for stock, _, _ in results]).mean()
    for _, loss, gradients in results:
        torch.testing.assert_close(loss, stock)
        assert len(gradients) == len(list(model.parameters()))
        for name, parameter in model.named_parameters():
            assert_close(gradients[name], parameter.grad, 1e-5, name)
