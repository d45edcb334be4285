"""The cost model: it issues what the loop issues, its arithmetic is what it says, and its measurement runs."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import cost_model
from benchmark import costs as costs_module
from benchmark import measure_costs, prediction
from benchmark.costs import CollectiveCost, Costs, Link, LocalWork, costs_from, fit
from benchmark.measure_links import Effort
from benchmark.prediction import Schedule, predict
from benchmark.ranks import BenchRanks
from benchmark.workload import Shape
from flce_dist import VocabShard, linear_cross_entropy
from tests.kit.skips import needs
from tests.kit.trace import Trace
from tests.kit.workers import Context, Pool

TINY = Shape("tiny", 48, 16, 301)
SHORT = Effort(1, 2, 1, 0.001, 2**17, (16, 16, 64))
DOCS = Path(__file__).parent.parent / "docs"
DOCUMENTED = DOCS / "data" / "costs-h200.json"
LINK = Link("measured", None, 0.0)


def constant_costs(**changes: Any) -> Costs:
    """Each product takes 10 s and each kernel 1 s; collectives 0.5 s and 10 us for each byte that a rank sends."""
    stages = {stage: [10.0 if stage in costs_module.PRODUCTS else 1.0, 0.0, 0.0] for stage in costs_module.STAGES}
    collectives = {name: CollectiveCost(0.5, 100e3) for name in ("all_gather", "all_reduce", "reduce_scatter")}
    return Costs(**({
        "stages": stages, "measured": {}, "collectives": collectives, "product_lost": 0.0, "collective_slower": 1.0,
        "small_kernels": 0.0, "host_call": 0.0, "host_chunk": 0.0,
    } | changes))  # fmt: skip


def _issued(
    ctx: Context, layout: str, hidden_size: int, vocab_size: int, num_tokens: int, rows: int
) -> list[tuple[str, float]]:
    """Products, and collectives with the bytes of their largest tensor, of a step."""
    shard = VocabShard.even(vocab_size, ctx.rank, ctx.world)
    mine = num_tokens // ctx.world if layout == "sharded" else num_tokens
    hidden = torch.randn(mine, hidden_size, requires_grad=True)
    weight = torch.randn(shard.num_rows, hidden_size, requires_grad=True)
    with Trace() as trace:
        loss = linear_cross_entropy(
            hidden, weight, torch.zeros(mine, dtype=torch.int64), group=ctx.group, vocab_size=vocab_size,
            chunk_rows=rows, hidden_layout=layout, check_ranks="never",
            max_tokens=mine if layout == "sharded" else None,
        )  # fmt: skip
        loss.backward()
    found = []
    for event in trace.events:
        if event.is_collective:
            tensors = zip(event.shapes, event.dtypes, strict=True)
            found.append((event.name, max(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in tensors)))
        elif event in trace.matrix_products:
            found.append(("product", 0.0))
    return found


@pytest.mark.parametrize(
    ("world", "hidden_size", "vocab_size", "products"), [(2, 8, 60, 9), (4, 8, 60, 9), (2, 4096, 2400, 12)]
)
@pytest.mark.parametrize("layout", ["replicated", "sharded"])
def test_the_model_issues_what_the_loop_issues(
    world: int, hidden_size: int, vocab_size: int, products: int, layout: str, workers: Pool
) -> None:
    """Products and collectives in the loop's order, and the bytes of each collective; the last chunk is smaller, and
    weight gradients come in two products where the shard is large enough."""
    traced = workers.run(world, _issued, layout, hidden_size, vocab_size, 40, 16)
    guess = predict(40, hidden_size, vocab_size, world, constant_costs(), LINK, layout, itemsize=4, rows=16)
    modelled = [("product" if name in costs_module.PRODUCTS else name, size) for name, size in guess.issued]
    assert modelled.count(("product", 0.0)) == products
    assert traced == [modelled] * world


HALF = (4096, 4096)
"""Hidden size and vocabulary for which, on two ranks, the first product of a weight gradient is half of it."""


def test_one_chunk_by_hand() -> None:
    """Two ranks, 10 rows: statistics 320 bytes of which a rank sends half, hidden gradient 163840. The gradient's sum
    runs beside the second half of the weight's product."""
    guess = predict(10, *HALF, 2, constant_costs(), LINK, itemsize=2)
    statistics, gradient = 0.5 + 160 / 100e3, 0.5 + 163840 / 100e3
    assert guess.waits == pytest.approx({"statistics": statistics, "hidden gradient": 0.0})
    assert gradient < 10 / 2
    # Row statistics, combination, row gradients, narrowing of the hidden gradient.
    assert guess.gpu == pytest.approx(3 * 10 + 4 + statistics)
    assert guess.efficiency == pytest.approx((3 * 10 + 1) / (2 * guess.gpu))


def same_time(seconds: float) -> dict[str, CollectiveCost]:
    return {name: CollectiveCost(seconds, 1e15) for name in ("all_gather", "all_reduce", "reduce_scatter")}


def test_what_a_product_does_not_cover_is_waited_for() -> None:
    slow = constant_costs(collectives=same_time(25.0))
    guess = predict(10, *HALF, 2, slow, LINK)
    assert guess.waits == pytest.approx({"statistics": 25, "hidden gradient": 25 - 10 / 2})
    whole = predict(10, *HALF, 2, slow, LINK, schedule=Schedule(split=False))
    assert whole.waits["hidden gradient"] == pytest.approx(25), "behind the only product of the weight's gradient"
    guess = predict(10, 4096, 8192, 2, slow, LINK)
    assert guess.waits["hidden gradient"] == pytest.approx(25 - 10 * 3 / 4), "the first product is one of four parts"
    slow = constant_costs(collectives=same_time(2.0), collective_slower=2.0, product_lost=0.5)
    guess = predict(10, *HALF, 2, slow, LINK)
    assert guess.lost == pytest.approx(0.5 * 2 * 2)
    assert guess.gpu == pytest.approx(3 * 10 + 4 + 2 + guess.lost)


def test_collectives_queue_up_behind_each_other() -> None:
    """The first chunk's hidden gradient starts in its weight gradient, and runs beside the second half, the second
    chunk's logits and row statistics; the second chunk's statistics wait for it."""
    costs = constant_costs(
        collectives={"all_gather": CollectiveCost(1.0, 1e15), "all_reduce": CollectiveCost(30.0, 1e15)}
    )
    guess = predict(20, *HALF, 2, costs, LINK, rows=10)
    assert guess.waits["statistics"] == pytest.approx(1 + (30 - 10 / 2 - 10 - 1) + 1)
    assert guess.waits["hidden gradient"] == pytest.approx(30 - 10 / 2)
    whole = predict(20, *HALF, 2, costs, LINK, rows=10, schedule=Schedule(split=False))
    assert whole.waits["statistics"] == pytest.approx(1 + (30 - 10 - 1) + 1)


@pytest.mark.parametrize(
    ("schedule", "wait", "expected"),
    [
        # The second chunk's gather stands behind the first chunk's sum, which starts after its weight gradient.
        (Schedule(split=False), "hidden states", 6 + 12 + 12),
        (Schedule(), "hidden states", 6 + 7 + 7),
        # Gathered ahead, it starts after the first chunk's logits, between the row kernels.
        (Schedule(prefetch=True), "hidden states", 6),
        (Schedule(), "statistics", 3 * 6),
        (Schedule(double_buffered=True), "statistics", 0),
    ],
)
def test_remedies(schedule: Schedule, wait: str, expected: float) -> None:
    """A collective takes 6 s, a product 10, three chunks."""
    costs, rows = constant_costs(collectives=same_time(6.0)), 20 if schedule.double_buffered else 10
    guess = predict(30, *HALF, 2, costs, LINK, "sharded", rows=rows, schedule=schedule)
    assert guess.rows == 10
    assert guess.waits[wait] == pytest.approx(expected)


def test_the_ring_sends_what_it_must() -> None:
    costs, link = constant_costs(), Link("ring", None, 0.25)
    assert costs.collective("all_reduce", 1600e3, 2, link) == pytest.approx(0.5 + 16)
    assert costs.collective("all_reduce", 1600e3, 8, link) == pytest.approx(0.5 + 12 * 0.25 + 16 * 14 / 8)
    assert costs.collective("all_reduce", 1600e3, 2, Link("slow", 10e3, 0.25)) == pytest.approx(0.5 + 160)
    assert costs.collective("all_gather", 1600e3, 8, link) == pytest.approx(0.5 + 6 * 0.25 + 16 * 7 / 8)


def test_the_host_bounds_a_step() -> None:
    guess = predict(40, 4, 100, 2, constant_costs(host_call=100.0, host_chunk=30.0), LINK, rows=10)
    assert guess.gpu < guess.host == guess.seconds == 190


def test_a_fit_gives_back_its_coefficients() -> None:
    features = [(1.0, a, b) for a, b in ((1e6, 1e3), (2e6, 5e3), (8e6, 1e3), (3e7, 9e4))]
    true = [2e-6, 3e-12, 4e-10]
    assert fit(features, [sum(t * f for t, f in zip(true, row, strict=True)) for row in features]) == pytest.approx(
        true
    )
    found = fit(features, [3e-12 * row[1] * (1 - 1e-3 * (row[2] > 5e3)) for row in features])
    assert min(found) >= 0, "what shows as negative is left out"
    assert found[1] == pytest.approx(3e-12, rel=1e-2)


def test_chunks_are_those_of_the_loop() -> None:
    work = LocalWork.planned(8192, 4096, 64128, 2, 2)
    assert (work.rows, work.num_chunks) == (4096, 2)
    work = LocalWork.planned(8192, 4096, 128256, 2, 1, rows=3000)
    assert [chunk.rows for chunk in work.chunks()] == [3000, 3000, 2192]
    assert {chunk.accumulator_itemsize for chunk in work.chunks()} == {4}
    work = LocalWork.planned(8192, 4096, 128256, 2, 1)
    assert (work.rows, work.accumulator_itemsize) == (4096, 2)
    work = LocalWork.planned(255, 4096, 1000, 2, 3, rows=128, sharded_tokens=True)
    assert (work.rows, work.num_chunks, work.accumulator_itemsize) == (126, 3, 4)
    work = LocalWork.planned(254, 4096, 1000, 2, 3, sharded_tokens=True)
    assert (work.num_tokens, work.rows) == (255, 255)


def test_a_measured_step_is_predicted_with_the_chunks_that_it_had() -> None:
    work = LocalWork(40, 16, 301, 1, 2, rows=10, accumulator_itemsize=2)
    step = {"method": "flce", "work": dataclasses.asdict(work), "seconds": 100.0}
    (check,) = prediction.check_steps(constant_costs(), {"steps": [step]})
    assert check["predicted"] == pytest.approx(4 * (3 * 10 + 1)), "four chunks, and no accumulator to narrow"


def measured(ranks: BenchRanks) -> dict[str, Any]:
    found = measure_costs.everything([TINY], [1, 2, 4], ranks, torch.float32, SHORT, lambda _: None)
    return json.loads(json.dumps(found))


def _measured(ctx: Context) -> dict[str, Any]:
    return measured(BenchRanks(ctx.rank, ctx.world, torch.device("cpu"), {ctx.world: ctx.group}))


def test_measured_on_two_ranks(workers: Pool) -> None:
    found, other = workers.run(2, _measured)
    assert found["points"] == other["points"], "the slowest rank's times, on both"
    assert {point["num_ranks"]: point["columns"] for point in found["points"]} == {1: 301, 2: 151, 4: 76}
    assert sorted(found["collectives"]) == ["all_gather", "all_reduce", "reduce_scatter"]
    costs = costs_from(found)
    for stage, seconds in found["points"][1]["seconds"].items():
        assert costs.stage(stage, LocalWork.planned(48, 16, 151, 4, 2)) == seconds > 0
    checks = prediction.check_steps(costs, found)
    assert {(check["num_ranks"], check["method"]) for check in checks} == {(2, "flce"), (2, "flce-sharded-tokens")}
    assert all(check["predicted_to_cut_floor"] > 1 for check in checks)
    assert predict(48, 16, 301, 4, costs, itemsize=4).num_ranks == 4


def test_from_a_measurement_to_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs.json"
    options = ["--costs", str(path), "--device", "cpu", "--ranks", "1,2"]
    assert cost_model.main([*options, "--measure", "--shapes", "48,16,301"]) == 0
    assert "48,16,301 (N 48 H 16 V 301): predicted" in capsys.readouterr().out
    content = json.loads(path.read_text())
    content["collectives"] = {
        name: [[2**16, 1e-5], [2**20, 1e-4]] for name in ("all_gather", "all_reduce", "reduce_scatter")
    }
    path.write_text(json.dumps(content | {"num_ranks": 2, "steps": []}))
    assert cost_model.main([*options, "--link", "mine,10,2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines if line.startswith("mine")] == [
        ["mine", "replicated", "2"],
        ["mine", "sharded", "2"],
    ]


def test_a_plot_of_predicted_and_measured_efficiencies(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason=needs("bench"))
    bench, plot = tmp_path / "results.json", tmp_path / "plot.png"
    row = {"shape": "llama3-8k", "method": "flce", "setting": "", "num_ranks": 2, "efficiency": 0.97}
    other = [row | {"method": "eager"}, row | {"setting": "rows=2"}, row | {"efficiency": None}]
    bench.write_text(json.dumps({"rows": [row, *other]}))
    assert cost_model.measured_efficiencies([row, *other]) == {"llama3-8k, replicated": [(2, 0.97)]}
    options = ["--shapes", "llama3-8k", "--ranks", "1,2,8", "--plot", str(plot), "--bench", str(bench)]
    assert cost_model.main(["--costs", str(DOCUMENTED), *options]) == 0
    assert plot.stat().st_size > 5000


def test_a_plot_from_one_rank_has_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason=needs("bench"))
    alone, plot = tmp_path / "costs.json", tmp_path / "plot.png"
    content = json.loads(DOCUMENTED.read_text())
    alone.write_text(json.dumps(content | {"collectives": {}, "steps": []}))
    assert cost_model.main(["--costs", str(alone), "--shapes", "llama3-8k", "--plot", str(plot)]) == 0
    assert "nothing is predicted for more" in capsys.readouterr().out
    assert plot.stat().st_size > 5000


def test_missing_measurements_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cost_model.main(["--costs", "nowhere.json"])
    assert "nowhere.json does not exist: make it with --measure" in capsys.readouterr().err


def test_the_documented_predictions_are_the_models() -> None:
    """Milliseconds and efficiency of each cell of the table in docs/scaling.md, from the measurements beside it."""
    costs = costs_from(json.loads(DOCUMENTED.read_text()))
    section = (DOCS / "scaling.md").read_text().split("\n## Predictions\n")[1]
    header, _, *rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    ranks = [int(cell) for cell in header[-5:]]
    links = {link.name: link for link in costs_module.LINKS}
    checked = 0
    for shape, link, layout, *cells in rows:
        found = re.fullmatch(r"N (\d+) H (\d+) V (\d+)", shape)
        if found is None:
            break
        for num_ranks, cell in zip(ranks, cells, strict=True):
            guess = predict(*map(int, found.groups()), num_ranks, costs, links[link], layout)
            assert cell == f"{1e3 * guess.seconds:.2f} ({guess.efficiency:.2f})", (shape, link, layout, num_ranks)
            checked += 1
    assert checked == 3 * 4 * 2 * 5
