"""What was written by somebody else is read as data: nothing that lies in a file is ever run."""

import ast
import re

from labkit import paths

UNSAFE = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = re.compile(r"(^|\.)(eval|exec|loads|read_pickle)$|^(torch|np|numpy|yaml)\.load$")
ALLOWED = {
    "judge.py: exec": "the learner's own cell, in a process of its own",
    "child_process.py: ForkingPickler.loads": "a call and its result, between labkit's own processes",
}


def test_data_is_read_as_data():
    found = set()
    for path in [*paths.PACKAGE.rglob("*.py"), *(paths.CHECKOUT / "benchmarks").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            odd = [name for name in names if name.partition(".")[0] in UNSAFE]
            call = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            odd += [call] if CALLS.search(call) and not call.startswith("json.") else []
            found |= {f"{path.name}: {each}" for each in odd}
    assert found <= set(ALLOWED), found - set(ALLOWED)
