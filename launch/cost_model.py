"""Predicts the time of a step on any number of ranks and links from what one or two GPUs can measure.

    torchrun --standalone --nproc-per-node 2 launch/cost_model.py --measure --costs runs/costs.json
    python launch/cost_model.py --costs runs/costs.json
    python launch/cost_model.py --costs runs/costs.json --shapes 4096,4096,32000 --ranks 4,8 --link mine,200,2

`docs/scaling.md` explains the model and the tables.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmark import plots, report, workload
from benchmark.costs import LINKS, PRODUCTS, Costs, Link, costs_from, fit_error, largest_and_median
from benchmark.measure_costs import everything
from benchmark.measure_links import QUICK, Effort
from benchmark.prediction import check_steps, predict
from benchmark.ranks import BenchRanks, run_and_exit

GPU_SHAPES = ["llama3-8k", "llama3-16k", "gemma2-8k"]
RANKS = [1, 2, 4, 8, 16, 64]


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add(
        "--costs", type=Path, default=Path("runs/costs.json"), help="the measurements, read or, with --measure, written"
    )
    add("--measure", action="store_true", help="measure here first; on two GPUs with torchrun, collectives too")
    add(
        "--shapes",
        nargs="+",
        type=_shape,
        help=f"names ({', '.join(workload.SHAPES)}) or N,H,V; default those measured",
    )
    add("--ranks", type=_numbers, default=RANKS, help="separated by commas; default 1,2,4,8,16,64")
    add("--link", action="append", type=_link, help="NAME,GB/s each way,microseconds a ring step; default all known")
    add("--plot", type=Path, help="a PNG of the predicted efficiency on the measured link")
    add("--bench", type=Path, help="results.json of bench.py --sweep ranks, whose efficiencies the plot shows too")
    add("--device", choices=("cuda", "cpu"), help="default cuda where there is one")
    args = parser.parse_args(arguments)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if not args.measure and not args.costs.exists():
        parser.error(f"{args.costs} does not exist: make it with --measure")
    return args


def _shape(text: str) -> workload.Shape:
    try:
        return workload.parse_shape(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _link(text: str) -> Link:
    name, bandwidth, hop = text.split(",")
    return Link(name, float(bandwidth) * 1e9, float(hop) * 1e-6)


def main(arguments: Sequence[str]) -> int:
    args = parse_arguments(arguments)
    if args.measure and not measure(args):
        return 0
    measurements = json.loads(args.costs.read_text())
    costs = costs_from(measurements)
    itemsize = getattr(torch, measurements["dtype"]).itemsize
    shapes = args.shapes or [workload.Shape(*shape) for shape in measurements["shapes"]]
    print(parameters(costs, measurements))
    ranks = args.ranks
    if not costs.collectives and ranks != [1]:
        print("measured without collectives, on one rank: nothing is predicted for more")
        ranks = [1]
    for shape in shapes:
        print(table(shape, costs, ranks, args.link or LINKS, itemsize))
    if args.plot:
        predicted = {
            f"{shape.name}, {layout}": [
                (n, predict(shape.num_tokens, shape.hidden_size, shape.vocab_size, n, costs, LINKS[0], layout,
                            itemsize).efficiency or 0.0)
                for n in ranks
            ]
            for shape in shapes
            for layout in METHODS
        }  # fmt: skip
        rows = json.loads(args.bench.read_text())["rows"] if args.bench else []
        plots.plot_efficiency(predicted, measured_efficiencies(rows), args.plot)
        print(f"wrote {args.plot}")
    return 0


METHODS = {"replicated": "flce", "sharded": "flce-sharded-tokens"}


def measured_efficiencies(rows: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """By the labels of the plot; of the default chunks."""
    found: dict[str, list[tuple[float, float]]] = {}
    for layout, method in METHODS.items():
        for row in rows:
            if row["method"] == method and not row["setting"] and row["efficiency"] is not None:
                found.setdefault(f"{row['shape']}, {layout}", []).append((row["num_ranks"], row["efficiency"]))
    return found


def measure(args: argparse.Namespace) -> bool:
    """Measures and writes; whether this is the rank that prints."""
    ranks = BenchRanks.start(args.device)
    on_gpu = args.device == "cuda"
    shapes = args.shapes or [workload.parse_shape(name) for name in (GPU_SHAPES if on_gpu else ["cpu"])]
    dtype, effort = (torch.bfloat16, Effort()) if on_gpu else (torch.float32, QUICK)
    found = everything(shapes, args.ranks, ranks, dtype, effort, ranks.say)
    if ranks.rank == 0:
        facts = report.environment(ranks.device, ["cost_model.py", *sys.argv[1:]])
        named = [[shape.name, shape.num_tokens, shape.hidden_size, shape.vocab_size] for shape in shapes]
        args.costs.parent.mkdir(parents=True, exist_ok=True)
        args.costs.write_text(json.dumps({"environment": facts, "shapes": named} | found, indent=1) + "\n")
        print(f"wrote {args.costs}")
    return ranks.rank == 0


def parameters(costs: Costs, measurements: dict[str, Any]) -> str:
    """The parameters in words, and how well they give back what was measured."""
    lines = []
    for stage, errors in fit_error(costs, measurements).items():
        fixed, per_unit, per_byte = costs.stages[stage]
        unit, name = (1e12, "operations / {} T/s") if stage in PRODUCTS else (1e9, "rows / {} G/s")
        largest, median = largest_and_median(errors)
        lines.append(
            f"{stage}: {1e6 * fixed:.1f} us + {name.format(_per(per_unit, unit))} + bytes / {_per(per_byte, 1e9)} GB/s;"
            f" off by {largest:.1%} at most, {median:.1%} in the median"
        )
    lines += [
        f"{name}: {1e6 * found.latency:.1f} us + bytes sent / {found.bandwidth / 1e9:.1f} GB/s"
        for name, found in costs.collectives.items()
    ]
    lines.append(
        f"a second of collectives delays a product beside it by {costs.product_lost:.3f} s, and takes"
        f" {costs.collective_slower:.2f} s there"
    )
    lines.append(
        f"other kernels of a call {1e6 * costs.small_kernels:.0f} us; host {1e3 * costs.host_call:.3f} ms a call"
        f" + {1e3 * costs.host_chunk:.3f} ms a further chunk"
    )
    for step in check_steps(costs, measurements):
        problem = f"N {step['num_tokens']} H {step['hidden_size']} V {step['vocab_size']}, {step['num_ranks']} ranks"
        lines.append(
            f"{problem}, {step['method']}: {1e3 * step['seconds']:.3f} ms, predicted {1e3 * step['predicted']:.3f}"
            f" ({step['predicted'] / step['seconds'] - 1:+.1%}); over the cut products {step['to_cut_floor']:.3f},"
            f" predicted {step['predicted_to_cut_floor']:.3f}"
        )
    return "\n".join(lines)


def _per(cost: float, unit: float) -> str:
    return f"{1 / cost / unit:.0f}" if cost else "unlimited"


def table(shape: workload.Shape, costs: Costs, ranks: Sequence[int], links: Sequence[Link], itemsize: int) -> str:
    header = (
        f"{'link':<18}{'hidden':<12}{'ranks':>5}{'rows':>7}{'ms':>9}{'eff.':>7}{'products':>10}{'kernels':>9}"
        f"{'statistics':>11}{'gather':>8}{'dX':>8}{'beside':>8}{'host ms':>9}"
    )
    lines = [f"\n{shape}: predicted; columns from products to beside in ms", header]
    for link in links:
        for layout in ("replicated", "sharded"):
            for num_ranks in ranks:
                if num_ranks == 1 and (layout, link) != ("replicated", links[0]):
                    continue
                found = predict(
                    shape.num_tokens, shape.hidden_size, shape.vocab_size, num_ranks, costs, link, layout, itemsize
                )
                waits = [
                    1e3 * found.waits.get(name, 0.0) for name in ("statistics", "hidden states", "hidden gradient")
                ]
                lines.append(
                    f"{link.name if num_ranks > 1 else '-':<18}{layout:<12}{num_ranks:>5}{found.rows:>7}"
                    f"{1e3 * found.seconds:>9.3f}{found.efficiency or 0:>7.3f}{1e3 * found.products:>10.3f}"
                    f"{1e3 * found.kernels:>9.3f}{waits[0]:>11.3f}{waits[1]:>8.3f}{waits[2]:>8.3f}"
                    f"{1e3 * found.lost:>8.3f}{1e3 * found.host:>9.3f}"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
