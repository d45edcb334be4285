"""The fine-tuning script of docs/transformers.md with the line that it is about, and without."""

from pathlib import Path

import pytest
import torch

from tests.kit.skips import needs
from tests.test_docs import ROOT, programs_of, run_program

pytest.importorskip("accelerate", reason=needs("hf"))

MEASURE = """
import re
for entry in trainer.state.log_history:
    if "train_loss" not in entry:
        print("step", entry.get("loss", entry.get("eval_loss")), entry.get("grad_norm", 0.0))
print("peak", 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]))
"""


def test_one_line_more_in_a_stock_script_gives_the_same_losses_with_less_memory(tmp_path: Path) -> None:
    """The program of docs/transformers.md, with its line and without."""
    found = {}
    (program,) = (p for p in programs_of(ROOT / "docs" / "transformers.md") if "fine_tune.py" in p.splitlines()[0])
    (line,) = (line for line in program.splitlines() if line.endswith("# the line"))
    for name, script in (("ours", program), ("stock", program.replace(line, ""))):
        (folder := tmp_path / name).mkdir()
        output = run_program(script + MEASURE, folder)[0]
        rows = [list(map(float, row.split()[1:])) for row in output.splitlines() if row.startswith("step ")]
        assert len(rows) == 5
        found[name] = torch.tensor(rows), float(output.split("peak ")[1])
    torch.testing.assert_close(found["ours"][0], found["stock"][0], rtol=1e-4, atol=1e-5)
    logits = 8 * 129 * 32000 * 4
    print({name: f"{peak / 2**20:.0f} MiB" for name, (_, peak) in found.items()})
    assert found["ours"][1] < found["stock"][1] - 1.5 * logits
