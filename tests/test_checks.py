"""Errors of one process: wrong arguments are refused with a message that says what was expected and what came."""

from typing import Any

import pytest
import torch

from flce_dist import LossOptions, VocabShard, arguments, linear_cross_entropy

X, E = torch.randn(6, 8), torch.randn(21, 8)
T = torch.tensor([0, 3, 20, -100, 7, 7])


def call(hidden: Any = X, weight: Any = E, target: Any = T, **keywords: Any) -> torch.Tensor:
    return linear_cross_entropy(hidden, weight, target, **keywords)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        # shapes
        ({"weight": torch.randn(21, 9)}, ValueError, ["8", "9"]),
        ({"target": T[:5]}, ValueError, ["6", "5"]),
        ({"target": T.reshape(2, 3)}, ValueError, ["6", "2", "3"]),
        ({"hidden": X.reshape(2, 3, 8)}, ValueError, ["2", "3", "6"]),
        ({"hidden": torch.randn(())}, ValueError, ["hidden"]),
        ({"bias": torch.zeros(20)}, ValueError, ["bias", "21", "20"]),
        ({"bias": torch.zeros(21, 1)}, ValueError, ["bias", "21"]),
        ({"class_weight": torch.ones(20)}, ValueError, ["class_weight", "21", "20"]),
        ({"token_weight": torch.ones(5)}, ValueError, ["token_weight", "6", "5"]),
        ({"token_weight": torch.ones(6, 1)}, ValueError, ["token_weight", "6"]),
        ({"normalizer": torch.ones(2)}, ValueError, ["normalizer"]),
        ({"weight": torch.randn(21, 8, 1)}, ValueError, ["weight"]),
        # dtypes
        ({"target": T.float()}, TypeError, ["target", "float32"]),
        ({"target": torch.rand(6, 21)}, TypeError, ["target", "float32"]),
        ({"target": T.to(torch.int16)}, TypeError, ["target", "int16"]),
        ({"target": T.to(torch.uint8)}, TypeError, ["target", "uint8"]),
        ({"target": T > 0}, TypeError, ["target", "bool"]),
        ({"hidden": X.long(), "weight": E.long()}, TypeError, ["int64"]),
        ({"hidden": X.double()}, TypeError, ["float64", "float32"]),
        ({"hidden": X.to(torch.complex64), "weight": E.to(torch.complex64)}, TypeError, ["complex64"]),
        ({"token_weight": torch.ones(6, dtype=torch.int64)}, TypeError, ["token_weight", "int64"]),
        ({"class_weight": torch.ones(21, dtype=torch.int64)}, TypeError, ["class_weight", "int64"]),
        ({"bias": torch.zeros(21).double()}, TypeError, ["bias", "float64", "float32"]),
        ({"logits_dtype": torch.float64}, ValueError, ["logits_dtype", "float32", "float64"]),
        ({"accum_dtype": torch.bfloat16}, ValueError, ["accum_dtype", "float32", "bfloat16"]),
        # no tensors
        ({"hidden": [[1.0]]}, TypeError, ["hidden", "list"]),
        ({"target": [1, 2]}, TypeError, ["target", "list"]),
        ({"weight": torch.nn.Linear(8, 21)}, TypeError, ["weight", "Linear"]),
        ({"normalizer": "six"}, TypeError, ["normalizer", "six"]),
        ({"normalizer": torch.tensor(True)}, TypeError, ["normalizer", "bool tensor"]),
        # what cannot be differentiated
        (
            {"token_weight": torch.ones(6, requires_grad=True)},
            ValueError,
            ["token_weight may not require grad"],
        ),
        (
            {"class_weight": torch.ones(21, requires_grad=True)},
            ValueError,
            ["class_weight may not require grad"],
        ),
        (
            {"normalizer": torch.tensor(3.0, requires_grad=True)},
            ValueError,
            ["normalizer may not require grad", "normalizer.detach()"],
        ),
        ({"normalizer": torch.tensor(3.0, dtype=torch.bfloat16)}, ValueError, ["normalizer", "bfloat16", "int64"]),
        ({"normalizer": torch.tensor(3.0, dtype=torch.float16)}, ValueError, ["normalizer", "float16", "int64"]),
        ({"normalizer": float("nan")}, ValueError, ["normalizer must be finite", "nan"]),
        ({"normalizer": -1.0}, ValueError, ["normalizer must be finite", "not negative", "-1.0"]),
        ({"normalizer": torch.tensor(3j)}, ValueError, ["normalizer", "real 0-d tensor"]),
        # devices
        ({"weight": E.to("meta")}, ValueError, ["cpu", "meta"]),
        ({"target": T.to("meta")}, ValueError, ["cpu", "meta"]),
        ({"bias": torch.zeros(21, device="meta")}, ValueError, ["cpu", "meta"]),
        ({"class_weight": torch.ones(21, device="meta")}, ValueError, ["class_weight", "cpu", "meta"]),
        ({"token_weight": torch.ones(6, device="meta")}, ValueError, ["token_weight", "cpu", "meta"]),
        # what goes together
        ({"hidden_layout": "sharded", "reduce_hidden_grad": False}, ValueError, ["reduce_hidden_grad", "replicated"]),
        ({"normalizer": 3, "reduction": "sum"}, ValueError, ["normalizer", "mean", "sum"]),
        ({"normalizer": -2.0}, ValueError, ["normalizer", "not negative", "-2.0"]),
        ({"normalizer": float("nan")}, ValueError, ["normalizer", "finite", "nan"]),
        # names
        ({"aux": "lse"}, TypeError, ["aux must be a sequence of names", "'lse'"]),
        ({"aux": ("loss_z",)}, ValueError, ["aux", "loss_z", "z_loss"]),
        ({"hidden_layout": "split"}, ValueError, ["hidden_layout", "split", "sharded"]),
        ({"redution": "mean"}, TypeError, ["redution"]),
        ({"reduction": "avg"}, ValueError, ["reduction", "avg"]),
        # sharding without a group
        ({"vocab_shard": VocabShard(21, 0, 20)}, ValueError, ["21", "20"]),
        ({"vocab_shard": VocabShard(42, 0, 21)}, ValueError, ["21", "42"]),
        ({"vocab_size": 42}, ValueError, ["21", "42"]),
        ({"vocab_size": 21, "vocab_shard": VocabShard(20, 0, 21)}, ValueError, ["21", "20"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_described(arguments: dict[str, Any], error: Any, words: list[str]) -> None:
    with pytest.raises(error) as caught:
        call(**arguments)
    message = str(caught.value)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(("scale", "error"), [(float("nan"), ValueError), ("2", TypeError), (None, TypeError)])
def test_hidden_grad_scale_is_a_finite_number(scale: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="hidden_grad_scale must be"):
        call(hidden_grad_scale=scale)


@pytest.mark.parametrize("name", ["softcap", "logit_scale", "z_loss", "normalizer", "hidden_grad_scale"])
@pytest.mark.parametrize("value", [1e39, 10**400])
def test_numbers_beyond_float32(name: str, value: float) -> None:
    """They would be infinite where the loss is formed, and a softcap of infinity gives nan."""
    with pytest.raises(ValueError, match=f"{name} must be finite in float32"):
        call(**{name: value})
    assert call(**{name: 1e30}).isfinite()


@pytest.mark.parametrize(
    ("max_tokens", "error", "words"),
    [
        (3, ValueError, "6 tokens, more than max_tokens=3"),
        (-1, ValueError, "max_tokens must be at least 0, got -1"),
        (2.0, TypeError, "max_tokens must be an int"),
    ],
)
def test_max_tokens_is_checked(max_tokens: Any, error: type[Exception], words: str) -> None:
    """Too small for the tokens there are, or no count; and without token sharding it has no meaning."""
    with pytest.raises(error, match=words):
        call(hidden_layout="sharded", max_tokens=max_tokens)
    with pytest.raises(ValueError, match='max_tokens is for hidden_layout="sharded"'):
        call(max_tokens=6)


@pytest.mark.parametrize("bad", [21, 22, -1, -7, 10**9, -(10**9)])
@pytest.mark.parametrize("position", [0, 5])
@pytest.mark.parametrize("chunk_rows", [None, 2])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_targets_outside_the_vocabulary(bad: int, position: int, chunk_rows: int | None, reduction: str) -> None:
    target = T.clone()
    target[position] = bad
    words = rf"^target {bad} of token {position} is outside \[0, 21\) and not ignore_index=-100$"
    with pytest.raises(IndexError, match=words):
        call(target=target, chunk_rows=chunk_rows, reduction=reduction)


def test_targets_outside_the_vocabulary_in_evaluation_and_in_2_d() -> None:
    with torch.no_grad(), pytest.raises(IndexError, match="target 99 of token 0"):
        call(target=torch.full((6,), 99))
    with pytest.raises(IndexError, match="target 99 of token 4"):
        call(hidden=X.reshape(2, 3, 8), target=torch.tensor([[1, 2, 3], [4, 99, 6]]))
    with pytest.raises(IndexError, match="target 99 of token 3"):
        call(target=torch.tensor([1, 2, 3, 99, 5, 6], dtype=torch.int32))


@pytest.mark.parametrize(
    "options", [{"class_weight": torch.rand(21)}, {"label_smoothing": 0.1}, {"token_scaling": True}]
)
def test_bad_targets_with_options(options: dict[str, Any]) -> None:
    with pytest.raises(IndexError, match=r"target 21 of token 3 is outside \[0, 21\)"):
        call(target=torch.tensor([0, 1, 2, 21, -100, 3]), **options)


def test_the_position_of_a_bad_target_counts_ignored_tokens() -> None:
    for skip_ignored in (False, True):
        with pytest.raises(IndexError, match="target 99 of token 4 "):
            call(target=torch.tensor([-100, -100, 1, -100, 99, 2]), skip_ignored=skip_ignored)


def test_minus_100_is_bad_when_another_index_is_ignored() -> None:
    with pytest.raises(IndexError, match=r"target -100 of token 3 .* not ignore_index=0"):
        call(ignore_index=0)


def test_padding_rows_are_no_targets() -> None:
    with pytest.raises(IndexError, match=r"target 18 of token 1 is outside \[0, 18\)"):
        call(target=torch.tensor([0, 18, 1, 2, 3, 4]), vocab_shard=VocabShard(18, 0, 21))


@pytest.mark.parametrize("chunk_rows", [None, 2])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_call_after_an_error_is_right(chunk_rows: int | None, reduction: str) -> None:
    with pytest.raises(IndexError, match="target 99"):
        call(target=torch.full((6,), 99), chunk_rows=chunk_rows, reduction=reduction)
    loss = call(chunk_rows=chunk_rows, reduction=reduction)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(X @ E.T, T, reduction=reduction))


def framework_weight(kind: str) -> torch.Tensor:
    if kind == "fsdp1 flat":
        return torch.randn(21 * 8)
    weight = torch.nn.Parameter(torch.empty(0) if kind == "zero3 flat" else torch.empty(0, 8))
    if kind.startswith("zero3"):
        weight.ds_id, weight.ds_shape, weight.ds_tensor = 3, torch.Size([21, 8]), torch.zeros(84)  # type: ignore
    return weight


@pytest.mark.parametrize(
    ("kind", "names", "remedy"),
    [
        ("zero3 flat", "ZeRO-3", "forward|gather"),
        ("zero3 rows", "ZeRO-3", "forward|gather"),
        ("fsdp1 flat", "FSDP", "forward|summon|unshard"),
        ("no rows", "ZeRO-3|FSDP", "forward|gather|unshard"),
    ],
)
@pytest.mark.parametrize("grad", [True, False])
def test_weights_as_frameworks_leave_them(kind: str, names: str, remedy: str, grad: bool) -> None:
    """The message names the framework and what to do."""
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=names) as caught:
        call(weight=framework_weight(kind))
    assert any(word in str(caught.value) for word in remedy.split("|")), caught.value


def test_triton_on_cpu_without_the_interpreter_does_not_fall_back() -> None:
    with pytest.raises(ValueError, match='backend="triton" cannot run'):
        call(backend="triton")


def test_an_options_object_is_no_keyword() -> None:
    with pytest.raises(TypeError, match="options"):
        call(options=LossOptions())


LIKE_ANOTHER: list[tuple[dict[str, Any], dict[str, Any], Any, list[str]]] = [
    # A call that is right, and one whose arguments compare equal or have the same shapes, which is not.
    ({"hidden_grad_scale": 1.0}, {"hidden_grad_scale": True}, TypeError, ["hidden_grad_scale", "True"]),
    ({"reduce_hidden_grad": True}, {"reduce_hidden_grad": 1}, TypeError, ["reduce_hidden_grad", "1"]),
    ({"label_smoothing": 0.0}, {"label_smoothing": False}, TypeError, ["label_smoothing", "False"]),
    ({"chunk_rows": 1}, {"chunk_rows": True}, TypeError, ["chunk_rows", "True"]),
    ({"vocab_size": 21}, {"vocab_size": 21.0}, TypeError, ["vocab_size", "21.0"]),
    ({"normalizer": 3.0}, {"normalizer": -3.0}, ValueError, ["normalizer", "-3.0"]),
    ({"normalizer": 1}, {"normalizer": True}, TypeError, ["normalizer", "True"]),
    ({"normalizer": 3.0}, {"normalizer": 3.0, "reduction": "sum"}, ValueError, ["normalizer", "sum"]),
    ({"reduction": "sum"}, {"normalizer": 3.0, "reduction": "sum"}, ValueError, ["normalizer", "sum"]),
    (
        {"class_weight": torch.ones(21)},
        {"class_weight": torch.ones(21, requires_grad=True)},
        ValueError,
        ["class_weight", "grad"],
    ),
    ({"token_weight": T * 0.5}, {"token_weight": (T * 0.5).to_sparse()}, TypeError, ["token_weight", "dense"]),
    ({"target": T}, {"target": T.to(torch.int16)}, TypeError, ["int16"]),
    ({}, {"weight": E.to("meta")}, ValueError, ["cpu", "meta"]),
    ({}, {"weight": E.to_sparse()}, TypeError, ["weight", "sparse"]),
    ({}, {"hidden": X.double()}, TypeError, ["float64"]),
]


@pytest.mark.parametrize(("right", "wrong", "error", "words"), LIKE_ANOTHER)
def test_a_wrong_call_after_a_right_one_like_it(
    right: dict[str, Any], wrong: dict[str, Any], error: Any, words: list[str]
) -> None:
    """What was checked is not checked again in a call with the same arguments: these are others."""
    good: dict[str, Any] = {"hidden": X, "weight": E, "target": T}
    linear_cross_entropy(**{**good, **right})
    with pytest.raises(error) as caught:
        linear_cross_entropy(**{**good, **wrong})
    for word in words:
        assert word in str(caught.value)
    linear_cross_entropy(**{**good, **right})


def test_a_weight_that_is_freed_after_a_right_call() -> None:
    weight = E.clone()
    linear_cross_entropy(X, weight, T)
    weight.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="FSDP has freed it"):
        linear_cross_entropy(X, weight, T)


def test_equal_calls_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    whole = arguments._setting
    monkeypatch.setattr(arguments, "_setting", lambda *given: checked.append(given) or whole(*given))
    monkeypatch.setattr(arguments, "_settings", {})
    monkeypatch.setattr(arguments, "_MAX_SETTINGS", 3)

    def calls(num_tokens: int) -> int:
        before = len(checked)
        linear_cross_entropy(X[:num_tokens], E, T[:num_tokens], label_smoothing=0.1, aux=("lse",))
        return len(checked) - before

    assert [calls(6), calls(6), calls(5), calls(6), calls(5)] == [1, 0, 1, 0, 0]
    # Lengths that vary without end are not all remembered.
    for num_tokens in range(5):
        calls(num_tokens)
    assert len(arguments._settings) <= 3
    # A list of names is as good as a tuple, though it may be no key.
    before = len(checked)
    for names in (["lse"], ["lse"], ("lse",), ["entropy"]):
        linear_cross_entropy(X, E, T, aux=names)
    assert len(checked) - before == 2
