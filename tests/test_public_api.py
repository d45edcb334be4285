"""The public names and signatures, and what an import does and does not do."""

import inspect
import subprocess
import sys
import textwrap
from pathlib import Path

import flce_dist

NAMES = {
    "LinearCrossEntropyLoss",
    "LossOptions",
    "LossOutput",
    "VocabParallelHead",
    "VocabShard",
    "count_valid_tokens",
    "linear_cross_entropy",
}


def run_python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[1],
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_exported_names_are_pinned() -> None:
    assert set(flce_dist.__all__) == NAMES
    for name in NAMES:
        assert getattr(flce_dist, name).__module__.startswith("flce_dist")
    public = {n for n in vars(flce_dist) if not n.startswith("_") and not inspect.ismodule(getattr(flce_dist, n))}
    assert public == NAMES


def test_every_public_name_is_documented() -> None:
    for name in NAMES:
        doc = inspect.getdoc(getattr(flce_dist, name))
        assert doc, f"{name} has no docstring"


def test_signature_of_linear_cross_entropy_is_pinned() -> None:
    parameters = inspect.signature(flce_dist.linear_cross_entropy).parameters
    assert list(parameters) == [
        "hidden",
        "weight",
        "target",
        "bias",
        "class_weight",
        "token_weight",
        "normalizer",
        "group",
        "vocab_size",
        "vocab_shard",
        "hidden_layout",
        "max_tokens",
        "reduce_hidden_grad",
        "hidden_grad_scale",
        "aux",
        "options",
    ]
    kinds = {name: p.kind for name, p in parameters.items()}
    assert all(kinds[n] == inspect.Parameter.POSITIONAL_OR_KEYWORD for n in ("hidden", "weight", "target"))
    assert kinds["options"] == inspect.Parameter.VAR_KEYWORD
    defaults = {n: p.default for n, p in parameters.items() if kinds[n] == inspect.Parameter.KEYWORD_ONLY}
    assert defaults == {
        "bias": None,
        "class_weight": None,
        "token_weight": None,
        "normalizer": None,
        "group": None,
        "vocab_size": None,
        "vocab_shard": None,
        "hidden_layout": "replicated",
        "max_tokens": None,
        "reduce_hidden_grad": True,
        "hidden_grad_scale": 1.0,
        "aux": (),
    }


def test_loss_output_fields_are_pinned() -> None:
    fields = ("loss", "z_loss", "lse", "accuracy", "predictions", "entropy", "num_valid")
    assert flce_dist.LossOutput._fields == fields
    assert issubclass(flce_dist.LossOutput, tuple)


OPTIONAL = ["triton", "transformers", "deepspeed", "accelerate", "tokenizers", "yaml", "matplotlib", "liger_kernel"]


def test_import_does_not_import_optional_packages() -> None:
    """Beyond what torch itself imports."""
    run_python(
        f"""
        import sys
        import torch
        before = set(sys.modules)
        import flce_dist
        assert not {OPTIONAL} & (set(sys.modules) - before), sorted({OPTIONAL} & set(sys.modules))
        """.replace(str(OPTIONAL), "{" + ", ".join(map(repr, OPTIONAL)) + "}")
    )


def test_import_and_use_without_triton() -> None:
    """As on macOS and Windows, where no triton exists: the torch backend serves."""
    run_python(
        """
        import sys
        sys.modules["triton"] = None
        import torch
        import flce_dist
        x, w = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
        t = torch.tensor([0, 4, -100, 2])
        loss = flce_dist.linear_cross_entropy(x, w, t)
        loss.backward()
        torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(x @ w.T, t))
        try:
            flce_dist.linear_cross_entropy(x, w, t, backend="triton")
        except (ImportError, RuntimeError, ValueError) as error:
            assert "triton" in str(error).lower(), error
        else:
            raise AssertionError("backend='triton' without triton fell back silently")
        """
    )


def test_import_and_use_initialise_neither_cuda_nor_process_groups() -> None:
    run_python(
        """
        import flce_dist
        import torch
        assert not torch.cuda.is_initialized()
        assert not torch.distributed.is_initialized()
        head = flce_dist.VocabParallelHead(3, 5)
        head(torch.randn(4, 3), torch.tensor([0, 4, -100, 2])).backward()
        assert not torch.cuda.is_initialized()
        assert not torch.distributed.is_initialized()
        """
    )


def test_package_is_typed() -> None:
    assert (Path(flce_dist.__file__).parent / "py.typed").exists()


def test_modules_are_short() -> None:
    folder = Path(flce_dist.__file__).parent
    lengths = {str(p.relative_to(folder)): len(p.read_text().splitlines()) for p in folder.rglob("*.py")}
    assert {name: n for name, n in lengths.items() if n > 350} == {}
