"""The command line of `bench.py`, checked; `docs/benchmarking.md` explains the options."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmark import methods, workload
from flce_dist.options import DTYPES, parse_bytes

OURS = "flce,flce-narrow,flce-fp32-accum,flce-fp32-logits"
RIVALS = "eager,compile,torch,liger,liger-chunk16,cce,fla,fla-bf16-accum"
SHARDED_RIVALS = "loss_parallel,cce,fla,fla-bf16-accum,megatron,verl"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time, memory and error of the loss, beside other implementations.")
    add = parser.add_argument
    add("--shapes", nargs="+", help=f"names ({', '.join(workload.SHAPES)}) or N,H,V; default llama3-8k, on CPU cpu")
    add("--methods", help=f"separated by commas, or all: {', '.join(methods.METHODS)}")
    add("--chunk-rows", type=_numbers, default=[], help="rows of a chunk for the flce methods, separated by commas")
    add("--budgets", type=_budgets, default=[], help="bytes of a chunk, such as 512MiB,1GiB; default the package's")
    add("--dtype", choices=DTYPES, help="default bf16, on CPU fp32")
    add("--data", choices=("random", "trained"), default="random", help="trained: a head with a large common component")
    add("--ignored", type=_share, default=0.0, help="share of ignored targets")
    add("--skip-ignored", action="store_true", help="drop ignored tokens before the first GEMM (flce methods)")
    add("--forward-only", action="store_true", help="no gradients; the floor is the logits GEMM")
    add("--graph", action="store_true", help="also replay the flce methods and the floor as CUDA graphs")
    add("--profile", action="store_true", help="also print a table of kernels for each method")
    add(
        "--sweep",
        choices=("tokens", "vocab", "budget", "ranks"),
        help="vary this and plot it; all but ranks: the first shape",
    )
    add("--rounds", type=_count, help="default 12, on CPU 5")
    add("--round-seconds", type=_seconds, default=0.06, help="time a method gets in a round")
    add("--seed", type=int, default=0)
    add("--device", choices=("cuda", "cpu"), help="default cuda where there is one")
    add("--out", type=Path, default=Path("runs/bench"), help="folder of results.json and the plots")
    add("--no-errors", action="store_true", help="do not compute the reference")
    args = parser.parse_args(arguments)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = args.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here; leave it out, or give --device cpu")
    args.dtype = args.dtype or ("bf16" if on_gpu else "fp32")
    args.rounds = args.rounds or (12 if on_gpu else 5)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if args.methods is None and on_gpu:
        args.methods = f"{OURS},{SHARDED_RIVALS if ranks > 1 else RIVALS}"
    elif args.methods is None:
        args.methods = f"flce,flce-fp32-accum,{'loss_parallel' if ranks > 1 else 'eager'}"
    if args.graph and not on_gpu:
        parser.error("--graph needs CUDA")
    if args.sweep == "ranks" and ranks == 1:
        parser.error(
            "--sweep ranks needs several processes, this is one; start it as "
            "torchrun --standalone --nproc-per-node 2 launch/bench.py --sweep ranks"
        )
    try:
        args.methods = methods.parse_methods(args.methods)
        args.shapes = [workload.parse_shape(text) for text in args.shapes or ["llama3-8k" if on_gpu else "cpu"]]
    except ValueError as error:
        parser.error(str(error))
    return args


def _count(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _numbers(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _budgets(text: str) -> list[str]:
    for part in text.split(","):
        try:
            num_bytes = parse_bytes("budget", part)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if num_bytes < 1:
            raise argparse.ArgumentTypeError(f"a budget must be at least one byte, got {part!r}")
    return text.split(",")


def _share(text: str) -> float:
    value = _float(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"expected a share of at least 0 and below 1, got {text!r}")
    return value


def _seconds(text: str) -> float:
    value = _float(text)
    if not (value > 0.0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return value


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
