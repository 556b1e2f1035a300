"""Does the fast suite notice a fault of one line? Draws faults by chance and runs the tests that reach each.

    python benchmarks/faults/faults.py draw    # faults.csv: six faults in each of eleven rooms
    python benchmarks/faults/faults.py reach   # the tests that run each line: `make test` with probes
    python benchmarks/faults/faults.py run     # each fault alone: the test that fails, or `missed`

`reach tests/data` runs these tests only, after they have changed, and keeps what is known of the others. A line outside
all functions runs once, when the first test imports it, so `run` takes all tests in the folder of its room.

The statements are drawn from all statements of a room, and the change from all that fit the statement, by a hash of
their text: nobody chooses, and an edit of one line leaves the faults of the others. Comments, docstrings, imports,
messages and annotations are not changed. A fault that changes no behaviour counts as missed, unless the column `note`,
which is written by hand, says why it has no effect. `draw` keeps results and notes of faults that it draws again.
"""

from __future__ import annotations

import argparse
import ast
import copy
import csv
import hashlib
import importlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("faults.csv")
WORK = Path(tempfile.gettempdir()) / "weft-faults"
HITS, PASSED = WORK / "hits.tsv", WORK / "passed.tsv"  # place of a fault and test; seconds and test
SEED, EACH = "0", 6
ROOMS = {  # files and folders below src/weft
    "order and seeding": ("data/order.py", "data/seeding.py", "data/dataset.py"),
    "split": ("data/split.py",),
    "decode": tuple(f"data/{name}.py" for name in ("decode", "colour", "bit_depth", "formats")),
    "crop": ("data/preprocessing.py", "data/transforms.py"),
    "fold": ("deploy/folding.py", "models/ceit/inference.py", "models/cvt/inference.py", "models/levit/inference.py"),
    "objective": ("train/objective.py", "train/distillation.py"),
    "state": ("train/state.py",),
    "config": ("checkpoints/config.py", "checkpoints/model_dir.py"),
    "guard": ("serve/guard.py",),
    "chooser": ("deploy/choosing.py",),
    "statistics": ("report/intervals.py", "study/statistics.py", "inference/metrics.py", "inference/scores.py"),
}
COMPARISONS = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OPERATIONS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "floor": "ceil", "argmin": "argmax"}
LIBRARIES = ("pytest", "torch", "torchvision", "timm", "sklearn", "scipy", "matplotlib", "pydantic")
FIELDS = ("room", "file", "line", "before", "after", "caught_by", "note")
PROBE = """
import os
_seen = set()
def hit(line):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if (line, test) not in _seen:
        _seen.add((line, test))
        file = os.open({path!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{{line}}\\t{{test}}\\n".encode())
        os.close(file)
"""


class Fault(NamedTuple):
    """One change of one line; `before` and `after` are the whole line without its indentation."""

    room: str
    file: str
    line: int
    before: str
    after: str
    start: int  # line of the statement, before which a probe is put

    @property
    def place(self) -> str:
        """The line, in the records of `reach`, which stay true if the number of the line changes."""
        return f"{self.file}: {self.before}"

    @property
    def tests(self) -> str:
        """The folder, or the file, with the tests of the room: how their names begin."""
        folder, is_inside, _ = self.file.partition("/")
        return f"tests/{folder}/" if is_inside else f"tests/test_{folder}"

    def runs_at_import(self) -> bool:
        """Whether the line is outside the bodies of all functions."""
        tree = ast.parse((ROOT / "src" / "weft" / self.file).read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        return not any(node.body[0].lineno <= self.line <= (node.end_lineno or 0) for node in functions)

    def source(self) -> str:
        """The file with this fault."""
        lines = (ROOT / "src" / "weft" / self.file).read_text().splitlines(keepends=True)
        old = lines[self.line - 1]
        assert old.strip() == self.before, f"{self.file}:{self.line} has changed; draw again"
        lines[self.line - 1] = old.replace(old.strip(), self.after)
        return "".join(lines)


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Replacements of one expression."""
    if isinstance(node, ast.Compare):
        new = copy.deepcopy(node)
        new.ops[0] = COMPARISONS[type(node.ops[0])]()
        yield new
    elif isinstance(node, ast.BoolOp):
        new = copy.deepcopy(node)
        new.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield new
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        new = copy.deepcopy(node)
        new.op = OPERATIONS[type(node.op)]()
        yield new
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield ast.Constant(value)
    elif isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in CALLS:
            new = copy.deepcopy(node)
            if isinstance(new.func, ast.Name):
                new.func.id = CALLS[name]
            elif isinstance(new.func, ast.Attribute):
                new.func.attr = CALLS[name]
            yield new
        for place in range(len(node.keywords)):
            if node.keywords[place].arg is not None:
                new = copy.deepcopy(node)
                del new.keywords[place]
                yield new


def expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Expressions of a statement itself: no text, no annotation, no default of a nested function."""
    todo: list[ast.AST] = []
    for name, value in ast.iter_fields(statement):
        if name in (
            "body",
            "orelse",
            "finalbody",
            "handlers",
            "annotation",
            "args",
            "returns",
            "decorator_list",
            "bases",
        ):
            continue
        if name == "keywords" and isinstance(statement, ast.ClassDef):
            continue
        todo += [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, ast.AST)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.JoinedStr):
            continue
        if isinstance(node, ast.expr):
            yield node
        todo += list(ast.iter_child_nodes(node))


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """All statements but imports, docstrings, definitions, messages of errors, and what only a type checker runs."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or isinstance(
            node,
            ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Raise | ast.Pass,
        ):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node


def faults_of(room: str, file: str) -> list[list[Fault]]:
    """All faults of each statement of a file."""
    text = (ROOT / "src" / "weft" / file).read_text()
    lines, found = text.splitlines(), []
    for statement in statements(ast.parse(text)):
        here = []

        def add(node: ast.stmt | ast.expr, new: str, statement: ast.stmt = statement, here: list[Fault] = here) -> None:
            number = node.lineno
            line = lines[number - 1].encode()
            after = (line[: node.col_offset] + new.encode() + line[node.end_col_offset :]).decode().strip()
            if node.end_lineno == number and after != lines[number - 1].strip():
                here.append(Fault(room, file, number, lines[number - 1].strip(), after, statement.lineno))

        for node in expressions(statement):
            for new in changes(node):
                words = ast.unparse(new)
                add(node, words if isinstance(new, ast.Constant | ast.Call | ast.Name) else f"({words})")
        if isinstance(statement, ast.If | ast.While):
            add(statement.test, f"(not ({ast.unparse(statement.test)}))")
        if isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr | ast.Continue | ast.Break):
            add(statement, "pass")
        if isinstance(statement, ast.Return) and statement.value is not None:
            add(statement, "return None")
        here = [fault for fault in here if is_python(fault)]
        if here:
            found.append(here)
    return found


def is_python(fault: Fault) -> bool:
    try:
        ast.parse(fault.source())
    except SyntaxError:
        return False
    return True


def lot(*texts: str) -> bytes:
    """The number that a statement or a change draws; those with the lowest are taken."""
    return hashlib.sha256("\0".join([SEED, *texts]).encode()).digest()


def draw() -> list[Fault]:
    """Six faults a room, each in another statement."""
    drawn: list[Fault] = []
    for room, files in ROOMS.items():
        candidates = [faults for file in files for faults in faults_of(room, file)]
        print(f"{room}: {len(candidates)} statements, {sum(map(len, candidates))} faults")
        taken = sorted(candidates, key=lambda faults: lot(room, faults[0].file, faults[0].before))[:EACH]
        drawn += [min(faults, key=lambda fault: lot(fault.before, fault.after)) for faults in taken]
    return drawn


def read_table() -> list[dict[str, str]]:
    with TABLE.open(newline="") as file:
        return list(csv.DictReader(file))


def write_table(rows: list[dict[str, str]]) -> None:
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def listed() -> list[tuple[Fault, dict[str, str]]]:
    """The faults of the table, with their rows."""
    known = {fault[:5]: fault for fault in draw()}
    rows = read_table()
    keys = [(row["room"], row["file"], int(row["line"]), row["before"], row["after"]) for row in rows]
    if set(keys) != set(known):
        sys.exit("The sources have changed since faults.csv was drawn. Run: faults.py draw")
    return [(known[key], row) for key, row in zip(keys, rows, strict=True)]


def pytest_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *arguments]


def environment(source: Path) -> dict[str, str]:
    path = os.pathsep.join([str(source), str(source.parent)])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TMPDIR": str(source.parent),
    }


def copied(name: str) -> Path:
    """A copy of src/ in a folder of its own."""
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return folder / "src"


def reach(workers: int, tests: list[str]) -> None:
    """Run the fast suite, or some of its tests, and record which tests run the line of each fault, and which pass."""
    source = copied("reach")
    for records in (HITS, PASSED):
        old = records.read_text().splitlines(keepends=True) if tests and records.exists() else []
        records.write_text("".join(line for line in old if not line.partition("\t")[2].startswith(tuple(tests))))
    HITS.chmod(0o666)  # some tests run as another user
    (source / "weft_probe.py").write_text(PROBE.format(path=str(HITS)))
    probes: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for fault, _ in listed():
        probes[fault.file].append((fault.start, fault.place))
    for file, places in probes.items():
        path = source / "weft" / file
        lines = path.read_text().splitlines(keepends=True)
        for start, place in sorted(places, reverse=True):
            while lines[start - 1].lstrip().startswith(("elif", "else", "except", "case", ")", "]", "}")):
                start -= 1
            old = lines[start - 1]
            indent = old[: len(old) - len(old.lstrip())]
            lines.insert(start - 1, f'{indent}__import__("weft_probe").hit({place!r})\n')
        text = "".join(lines)
        future = "from __future__ import annotations\n"
        ast.parse(text)
        assert text.index(future) < (text.find("weft_probe") % (1 << 40)), file
        path.write_text(text)
    junit = WORK / "reach.xml"
    options = (f"--junitxml={junit}", "-o", "junit_family=xunit1", "-n", str(workers), "--dist", "worksteal")
    subprocess.run(pytest_command(*options, *tests), cwd=ROOT, env=environment(source), check=False)
    with PASSED.open("a") as file:
        file.writelines(f"{seconds}\t{test}\n" for test, seconds in durations(junit).items())
    reached = tests_by_place()
    print(f"{sum(fault.place in reached for fault, _ in listed())} of {len(listed())} faults are reached by a test")


def tests_by_place() -> dict[str, set[str]]:
    reached = defaultdict(set)
    for line in HITS.read_text().splitlines():
        place, _, test = line.partition("\t")
        reached[place].add(test)
    return reached


def durations(junit: Path) -> dict[str, float]:
    """Node ids of the tests that passed without a fault, with their seconds."""
    found = {}
    for case in ET.parse(junit).iter("testcase"):
        if case.find("failure") is None and case.find("error") is None and case.find("skipped") is None:
            module = case.get("file", "")
            inner = case.get("classname", "").removeprefix(module.removesuffix(".py").replace("/", ".")).strip(".")
            name = f"{module}::{inner}::{case.get('name')}" if inner else f"{module}::{case.get('name')}"
            found[name] = float(case.get("time", 0))
    return found


def tried(number: int, fault: Fault, tests: list[str], usual: float, seconds: float) -> str:
    """The first test that fails with the fault and passes without it.

    `missed` if there is none, or if the tests take longer than `seconds` and usually almost as long.
    """
    while tests:
        result = failed(number, fault, tests, usual, seconds)
        if result in ("missed", "does not end"):
            return result
        first = next(test for test in tests if test.startswith(result))  # of the module, if it cannot be imported
        if failed(number, fault._replace(after=fault.before), [first], usual, seconds) == "missed":
            return result
        tests = [test for test in tests if not test.startswith(result)]
    return "missed"


def failed(number: int, fault: Fault, tests: list[str], usual: float, seconds: float) -> str:
    """The first test that fails with the fault."""
    source = copied(f"fault-{number}")
    (source / "weft" / fault.file).write_text(fault.source())
    log = source.parent / "log.txt"
    process = multiprocessing.get_context("fork").Process(target=_pytest, args=(source, tests, log))
    process.start()
    process.join(seconds)
    if process.is_alive():
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        result = "does not end" if usual < seconds / 4 else "missed"
    elif process.exitcode == 0:
        result = "missed"
    else:
        text = log.read_text()
        lines = [line for line in text.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))]
        if not lines:
            raise RuntimeError(f"no test of {fault} failed, and pytest ended with {process.exitcode}: {text[-2000:]}")
        result = lines[0].partition(" ")[2].partition(" - ")[0]
    shutil.rmtree(source.parent, ignore_errors=True)
    return result


def _pytest(source: Path, tests: list[str], log: Path) -> None:
    """Run tests on other sources, in a process that has imported libraries but nothing of weft."""
    os.setsid()
    os.environ.update(environment(source))
    sys.path[:0] = [str(ROOT), str(source)]
    os.chdir(ROOT)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    options = ("-x", "-q", "-rfE", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-m", "not slow")
    options += ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # of plugins that the libraries import
    code = importlib.import_module("pytest").main([*options, *tests])
    sys.stdout.flush()
    os._exit(int(code))


def run(workers: int, again: bool, seconds: float, most: int | None) -> None:
    """Try each fault that has no result; with `again`, also those that were missed."""
    for library in LIBRARIES:
        importlib.import_module(library)
    passed = {test: float(time) for time, _, test in (line.partition("\t") for line in PASSED.read_text().splitlines())}
    reached = tests_by_place()
    pairs = listed()
    rows = [row for _, row in pairs]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        futures = {}
        for number, (fault, row) in enumerate(pairs):
            if row["caught_by"] and not (again and row["caught_by"] == "missed"):
                continue
            tests = reached[fault.place] & passed.keys()
            if fault.runs_at_import():
                tests |= {test for test in passed if test.startswith(fault.tests)}
            tests = sorted(tests, key=lambda test: (not test.startswith(fault.tests), passed[test]))
            usual = sum(map(passed.__getitem__, tests[:most]))
            futures[pool.submit(tried, number, fault, tests[:most], usual, seconds)] = fault, row
        for future in as_completed(futures):
            fault, row = futures[future]
            row["caught_by"] = future.result()
            print(f"{fault.room}: {fault.file}:{fault.line}: {fault.before} -> {fault.after}: {row['caught_by']}")
            write_table(rows)
    report(rows)


def report(rows: list[dict[str, str]]) -> None:
    caught = [row for row in rows if row["caught_by"] not in ("", "missed")]
    for room, number in Counter(row["room"] for row in caught).items():
        print(f"{room}: {number} of {EACH}")
    without_effect = sum(bool(row["note"]) for row in rows if row["caught_by"] == "missed")
    print(f"caught: {len(caught)} of {len(rows)}; {without_effect} of the others have no effect")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("draw", "reach", "run"))
    parser.add_argument("tests", nargs="*", help="of reach: files and folders (default: all tests)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--again", action="store_true", help="also try faults that were missed")
    parser.add_argument("--most", type=int, help="limit on the tests for one fault (default: all that reach it)")
    parser.add_argument("--seconds", type=float, default=900, help="limit for one fault (default: 900)")
    args = parser.parse_intermixed_args()
    if args.step == "draw":
        old = (
            {tuple(row[name] for name in FIELDS[:5] if name != "line"): row for row in read_table()}
            if TABLE.exists()
            else {}
        )
        rows = []
        for fault in draw():
            row = dict(zip(FIELDS, (*map(str, fault[:5]), "", ""), strict=True))
            kept = old.get(tuple(row[name] for name in FIELDS[:5] if name != "line"), {})
            rows.append(row | {name: kept.get(name, "") for name in ("caught_by", "note")})
        write_table(rows)
    elif args.step == "reach":
        reach(args.workers, args.tests)
    else:
        run(args.workers, args.again, args.seconds, args.most)


if __name__ == "__main__":
    main()
