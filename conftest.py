"""Executes every lesson once for a whole test session, and lets nbval compare with that execution.

`executed(lesson)` gives tests the result; `pytest --nbval-lax notebooks` compares the committed outputs of
cells marked `# NBVAL_CHECK_OUTPUT` with the outputs of the same execution. Without this, nbval would run
each lesson a second time in a kernel of its own. Under pytest-xdist the workers share it too.
"""

import hashlib
import itertools
import json
import os
import pickle
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from filelock import FileLock
from nbformat import NotebookNode
from nbval.plugin import IPyNbFile

SHARED = "LABKIT_TEST_LESSONS"
"""Names the folder of this session's executions; xdist's workers inherit it."""
RECORD = "LABKIT_RECORD_TESTS"
"""Set to 1 to keep what a run on a GPU found."""
MADE = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    if SHARED not in os.environ:
        config.stash[MADE] = Path(tempfile.mkdtemp(prefix="labkit-lessons-"))
        os.environ[SHARED] = str(config.stash[MADE])


def pytest_unconfigure(config: pytest.Config) -> None:
    made = config.stash.get(MADE, None)
    if made is not None:
        del os.environ[SHARED]
        shutil.rmtree(made)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """With LABKIT_RECORD_TESTS=1 and a GPU: what this run of the tests found is kept beside the tapes."""
    if os.environ.get(RECORD) != "1":
        return
    from labkit import gpu, paths
    from labkit.measure import machine

    if not gpu.available():
        raise pytest.UsageError(f"{RECORD}=1 keeps a run on a GPU, and there is none here")
    found = {
        kind: len(terminalreporter.stats.get(kind, [])) for kind in ("passed", "failed", "error", "skipped")
    }
    kept = paths.RECORDED / machine.identity().slug / "tests.json"
    paths.write_text(kept, json.dumps({**machine.row_columns(), **found}, indent=1) + "\n")
    terminalreporter.write_line(f"kept: {kept}")


def execute_once(path: Path) -> Any:
    """The `execute.Result` of a lesson, executed by whoever of this session asks first."""
    from labkit.runs import execute  # not above: most test files have nothing to do with lessons

    key = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    folder = Path(os.environ[SHARED]) / f"{path.stem}-{key}"
    folder.mkdir(exist_ok=True)
    kept = folder / "result.pickle"
    with FileLock(folder / "lock"):
        if not kept.exists():
            kept.write_bytes(pickle.dumps(execute.execute(path, folder / path.name)))
    return pickle.loads(kept.read_bytes())


@pytest.fixture(scope="session")
def executed() -> Callable[[Path], Any]:
    """A function from a lesson's path to the result of its one execution."""
    return execute_once


class ReplayedNotebook(IPyNbFile):
    """A notebook whose cells nbval compares with an execution that has been."""

    def setup(self) -> None:
        self.kernel = ReplayedKernel(execute_once(self.path).notebook_path)
        self.setup_sanitize_files()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Generator[None, list[Any], list[Any]]:
    found = yield
    return [
        ReplayedNotebook.from_parent(parent, path=file_path) if isinstance(each, IPyNbFile) else each
        for each in found
    ]


class ReplayedKernel:
    """Answers, in the place of `nbval.kernel.RunningKernel`, what an executed notebook has to say."""

    def __init__(self, executed: Path) -> None:
        from labkit.lessons import notebooks

        cells = [cell for _, cell in notebooks.code_cells(notebooks.read(executed))]
        self._cells: Iterator[NotebookNode] = iter(cells)
        self._numbers = itertools.count()
        self._messages: deque[dict[str, Any]] = deque()

    def is_alive(self) -> bool:
        return True

    def stop(self) -> None:
        """Nothing runs."""

    def execute_cell_input(self, source: str, allow_stdin: bool | None = None) -> str:
        """Line up the outputs of the next cell with this source; cells that nobody asked for are passed."""
        request = f"request-{next(self._numbers)}"
        cell = next((cell for cell in self._cells if cell.source == source), None)
        if cell is None:
            raise RuntimeError("the executed notebook has no such cell: was the lesson edited meanwhile?")
        contents = [_content(output) for output in cell.outputs]
        if source.strip() and cell.execution_count is None:
            missed = "an earlier cell failed, and this one did not run"
            contents.append(("error", {"ename": "NotRun", "evalue": missed, "traceback": [missed]}))
        contents.append(("status", {"execution_state": "idle"}))
        self._messages = deque(
            {"msg_type": kind, "content": content, "parent_header": {"msg_id": request}}
            for kind, content in contents
        )
        return request

    def await_reply(self, request: str, timeout: float | None = None) -> None:
        """The reply is there already."""

    def await_idle(self, request: str, timeout: float | None = None) -> None:
        """So is everything that was shown."""
        self._messages.clear()

    def get_message(self, stream: str, timeout: float | None = None) -> dict[str, Any]:
        """The next message of a cell."""
        if not self._messages:
            raise Empty
        return self._messages.popleft()


def _content(output: NotebookNode) -> tuple[str, dict[str, Any]]:
    """An output as the message that it came in."""
    content = {key: value for key, value in output.items() if key != "output_type"}
    return output.output_type, content
