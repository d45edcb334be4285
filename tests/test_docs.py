"""The documentation stays true: what it links to and names exists, and the README's programs run."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flce_dist import LossOptions, LossOutput, linear_cross_entropy
from flce_dist.arguments import MAX_EXACT_ID
from flce_dist.plan import MAX_NARROW_CHUNKS, default_budget
from tests.kit.processes import free_port

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
PYTHON_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
PROOF = re.compile(r"\[`([\w/]+\.py)::([\w:]+)`\]\(\.\./tests/([\w/]+\.py)\)")
OPTIONS = {field.name: field.default for field in dataclasses.fields(LossOptions)}
ARGUMENTS = {
    name: parameter.default
    for name, parameter in inspect.signature(linear_cross_entropy).parameters.items()
    if name != "options"
}
AUX = [name for name in LossOutput._fields if name != "loss"]


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


def without_code(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(without_code(page)):
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_files_named_in_text_exist(page: Path) -> None:
    """Paths below the repository's root, such as `launch/train.py`."""
    named = re.findall(
        r"(?<![\w/.])((?:configs|docs|flce_dist|launch|tests)/[\w/.-]+\.(?:py|md|yaml|png))", page.read_text()
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_make_targets_exist(page: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    named = re.findall(r"(?:^|`)make ([\w-]+)", page.read_text(), flags=re.MULTILINE)
    assert [name for name in named if name not in targets] == []


def test_make_clean_keeps_the_runs() -> None:
    (recipe,) = re.findall(r"^clean:\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert ".cache" in recipe.split()
    assert "runs" not in recipe.split()


def names_of_tests(path: Path) -> set[str]:
    """Names of the tests of a file, those of a class with its name before."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return {name for name in found if name.split("::")[-1].startswith("test_")}


def test_each_feature_names_tests_that_exist() -> None:
    proofs, unproven = [], []
    for line in (ROOT / "docs" / "features.md").read_text().splitlines():
        if not line.startswith("| ") or line.startswith("| | ") or line.count("|") != 12:
            continue
        feature, ours = (cell.strip() for cell in line.split("|")[1:3])
        found = PROOF.findall(ours)
        proofs += found
        if not found:
            unproven.append((feature, ours))
    assert len(proofs) > 40
    assert all(named == linked for named, _, linked in proofs)
    known = {file: names_of_tests(ROOT / "tests" / file) for file, _, _ in proofs}
    assert [f"{file}::{name}" for file, name, _ in proofs if name not in known[file]] == []
    # What the package does not do needs no proof, but has to say so.
    assert [feature for feature, ours in unproven if ours != "no"] == []


def test_field_reports_are_listed_and_name_what_exists() -> None:
    page = (ROOT / "docs" / "field-reports.md").read_text()
    named = re.findall(r"\[`(\w+)`\]\(\.\./tests/([\w/]+\.py)\)", page)
    listed, cases, numbers, known = set(), set(), set(), {}
    for path in (ROOT / "tests").rglob("*.py"):
        text, file = path.read_text(), str(path.relative_to(ROOT / "tests"))
        known[file] = {part.name for part in ast.parse(text).body if isinstance(part, ast.FunctionDef | ast.ClassDef)}
        cases |= {(name, file) for name in known[file] if re.match(r"TestB\d", name)}
        numbers |= set(re.findall(r"\b(?:Test)?(B\d\d)(?!\d)", text))
    for row in re.findall(r"^\| B\d.*$", page, flags=re.MULTILINE):
        number, classes = row[2:5], re.findall(r"`(TestB\w+)`", row)
        listed.add(number)
        assert [name for name in classes if not name.startswith(f"Test{number}")] == []
        assert "https://github.com/" in row
    assert len(cases) > 20
    assert cases <= set(named)
    assert numbers == listed
    assert [f"{file}::{name}" for name, file in named if name not in known.get(file, ())] == []


def rows(heading: str) -> list[list[str]]:
    """Cells of the rows of the first table below a heading of docs/options.md, its head left out."""
    text = (ROOT / "docs" / "options.md").read_text()
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = re.search(r"((?:^\|.*\n)+)", section, flags=re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[1].splitlines()[2:]]


@pytest.mark.parametrize(
    ("heading", "expected"),
    [("Arguments of `linear_cross_entropy`", ARGUMENTS), ("Options: the fields of `LossOptions`", OPTIONS)],
    ids=["arguments", "options"],
)
def test_every_argument_and_option_is_explained_with_its_default(heading: str, expected: dict[str, object]) -> None:
    documented = {name.strip("`"): default.strip("`") for name, default, *_ in rows(heading)}
    assert list(documented) == list(expected)
    for name, default in expected.items():
        if default is inspect.Parameter.empty:
            assert documented[name] == "", name
        else:
            assert ast.literal_eval(documented[name]) == default, name


def test_every_output_is_explained() -> None:
    text = (ROOT / "docs" / "options.md").read_text()
    assert sorted(re.findall(r'^\| `"(\w+)"` \|', text, flags=re.MULTILINE)) == sorted(AUX)


def test_the_readme_lists_all_options_and_no_others() -> None:
    section = (ROOT / "README.md").read_text().split("\n## Options\n")[1].split("\n## ")[0]
    listed = re.findall(r"`(\w+)`", "\n".join(line for line in section.splitlines() if line.startswith("|")))
    assert set(listed) - {"aux"} == (set(ARGUMENTS) | set(OPTIONS) | set(AUX)) - {"hidden", "weight", "target", "aux"}


def test_numbers_in_the_text_are_those_of_the_code() -> None:
    options, design = ((ROOT / "docs" / name).read_text() for name in ("options.md", "design.md"))
    assert f"bfloat16 over more than {MAX_NARROW_CHUNKS} chunks" in options
    assert f"up to {MAX_NARROW_CHUNKS} chunks of bfloat16" in design
    for text in (options, design):
        assert f"{default_budget(0, 0) // 2**20} MiB" in text
    assert MAX_EXACT_ID == 2**24
    assert "V > 2^24" in options


def test_each_file_has_its_place_in_the_design() -> None:
    section = (ROOT / "docs" / "design.md").read_text().split("\n## Where things are\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    package = ROOT / "flce_dist"
    files = [path.name for path in package.glob("[!_]*.py")]
    folders = [f"{path.parent.name}/" for path in package.glob("*/__init__.py")]
    assert sorted(named) == sorted(files + folders)


def programs_of(page: Path) -> list[str]:
    return [block for block in PYTHON_BLOCK.findall(page.read_text()) if COMMAND.fullmatch(block.splitlines()[0])]


COMMAND = re.compile(r"# (?:python|torchrun --nproc-per-node (\d)) (\w+\.py)")
README_PROGRAMS = PYTHON_BLOCK.findall((ROOT / "README.md").read_text())
# All blocks of the README, and those of other pages that begin with their command. test_trainers.py has its own page.
PROGRAMS = README_PROGRAMS + [block for page in PAGES[1:] if page.name != "trainers.md" for block in programs_of(page)]
# Processes are left as soon as all are done: tearing gloo down at exit can hang.
RUNNER = """
import os, pathlib, runpy, sys
import torch.distributed as dist
program = pathlib.Path(sys.argv[1]).read_text()
if "deepspeed" in program:
    import deepspeed
    deepspeed.ops.__compatible_ops__ = {}  # nothing is compiled
    if "Trainer" in program:
        # For several processes without a GPU accelerate chooses no backend where DeepSpeed is asked for.
        import torch
        from accelerate.state import DistributedType, PartialState
        if not torch.cuda.is_available():
            os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]  # torchrun sets it
            PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_CPU)
runpy.run_path(sys.argv[1], run_name="__main__")
if dist.is_initialized():
    dist.barrier()
sys.stdout.flush()
os._exit(0)
"""


def test_the_readme_has_programs() -> None:
    assert len(README_PROGRAMS) >= 4


def run_program(program: str, folder: Path) -> list[str]:
    """Runs it as its first line says (`# python FILE` or `# torchrun --nproc-per-node N FILE`); what each process
    printed."""
    command = COMMAND.fullmatch(program.splitlines()[0])
    assert command is not None
    for package in ("transformers", "accelerate", "lightning", "deepspeed"):
        if re.search(rf"^(?:from|import) .*\b{package}\b", program, flags=re.MULTILINE):
            pytest.importorskip(package, reason="needs the [train] and [test] extras")
    size = int(command[1] or 1)
    (folder / command[2]).write_text(program)
    (folder / "runner.py").write_text(RUNNER)
    common = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if size > 1:
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    processes = [
        subprocess.Popen(
            [sys.executable, "runner.py", command[2]],
            cwd=folder,
            env=common | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = []
        for process in processes:
            outputs.append(process.communicate(timeout=500)[0])
            if process.returncode:  # the others would wait for it
                for other in processes:
                    other.kill()
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * size, "\n".join(outputs)
    return outputs


@pytest.mark.timeout(600)  # some seconds; whoever shares the cores must not fail it
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.splitlines()[0].split()[-1])
def test_programs_run(program: str, tmp_path: Path) -> None:
    run_program(program, tmp_path)
