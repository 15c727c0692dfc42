"""The house rules that a program can check: who imports whom, and how large files and functions are."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(p for top in ("lra", "models", "attention") for p in (ROOT / top).rglob("*.py"))
OURS = {"lra", "models", "attention"}
ONLY = {
    "wandb": {"lra/tracking.py"},
    "datasets": {"lra/data/sources.py"},
    "pandas": {"lra/table.py", "lra/render.py"},
    "matplotlib": {"lra/plot.py"},
    "hydra": {"lra/config.py", "lra/train.py", "lra/sweep.py"},
    "omegaconf": {"lra/config.py", "lra/train.py", "lra/sweep.py"},
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_imports_point_one_way(path):
    allowed = {"attention": {"attention"}, "models": {"models", "attention"}, "lra": OURS}[
        path.relative_to(ROOT).parts[0]
    ]
    used = {name.split(".")[0] for name in imports(path)}
    assert used & OURS <= allowed
    for package, files in ONLY.items():
        assert package not in used or relative(path) in files, f"{package} is imported by {relative(path)}"


@pytest.mark.parametrize("path", [*SOURCES, *sorted((ROOT / "tests").rglob("*.py"))], ids=relative)
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 80, node.name


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("lra.cli", ("torch", "hydra", "pandas")),
        ("lra.table", ("torch", "hydra")),
        ("lra.tasks.listops", ("torch",)),
        ("lra.tasks.text", ("torch", "datasets")),
    ],
)
def test_light_modules_stay_light(module, forbidden):
    code = f"import sys, {module}; print([m for m in {forbidden!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_every_yaml_of_a_registry_exists():
    import attention
    import lra.tasks

    assert {p.stem for p in (ROOT / "conf/attention").glob("*.yaml")} == set(attention.REGISTRY)
    assert {p.stem for p in (ROOT / "conf/task").glob("*.yaml")} == set(lra.tasks.REGISTRY)
