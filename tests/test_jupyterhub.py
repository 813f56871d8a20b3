"""The example hub of docs/JUPYTERHUB.md, started on loopback: two learners at once, and what each can see."""

import importlib.util
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import zmq

from labkit import device, places

if not all(map(importlib.util.find_spec, ("jupyterhub", "jupyterhub_idle_culler", "websocket"))):
    pytest.skip(
        "jupyterhub, its idle culler or websocket-client is not installed in this environment",
        allow_module_level=True,
    )

import fewer
import hubs
from hubs import Hub, Kernel, Learner
from processes import wait_for
from websocket import WebSocketBadStatusException

LESSON = "labkit/01_launch_overhead.ipynb"
DOCS = places.CHECKOUT / "docs"
START = DOCS / "jupyterhub" / "start"

WATCH = """
import contextlib, json, time
from labkit import device, machine
from labkit.measure import lock

hold, REGIONS = lock.hold, []

@contextlib.contextmanager
def watched(gpu, *rest):
    with hold(gpu, *rest):
        began = time.monotonic_ns()
        try:
            yield
        finally:
            REGIONS.append((gpu, began, time.monotonic_ns()))

lock.hold = watched
"""
"""Notes when the kernel has its turn; the clock is the same in all processes of a machine."""

TURNS = """
REGIONS.clear()
if not device.has_gpu():
    device.uuid = lambda: "GPU-11111111-2222-3333-4444-555555555555"
while time.time() < {start}:
    time.sleep(0.001)
for _ in range({count}):
    with machine.gpu_turn():
        time.sleep(0.01)
print(json.dumps(REGIONS))
"""
"""Timed regions of a GPU's length, as many as a sweep has, begun by all at the same time."""
COUNT = 25


@pytest.fixture(scope="module")
def hub(tmp_path_factory, request):
    # Not in pytest's own folder, which only the user of the tests may enter.
    folder = Path(tempfile.mkdtemp(prefix="labkit-hub-"))
    running = Hub(folder)
    try:
        running.wait()
        yield running
    finally:
        running.stop()
        if request.session.testsfailed:
            print(running.tail())
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def everybody(hub: Hub) -> dict[str, Learner]:
    """All learners, logged in, their servers running."""
    found = {name: Learner(hub, name) for name in hubs.NUMBERS}
    for learner in found.values():
        assert learner.log_in()
    at_once(Learner.start, found.values())
    return found


@pytest.fixture(scope="module")
def idle(everybody: dict[str, Learner]) -> Kernel:
    """A kernel, with its page open, that does nothing from now on, at a learner's whose time is short."""
    kernel = everybody[hubs.CULLED].open(LESSON)
    assert kernel.run("print(6 * 7)") == "42\n"
    return kernel


@pytest.fixture(scope="module")
def learners(everybody: dict[str, Learner], idle: Kernel) -> dict[str, Learner]:
    """Ada and Ben, whose kernels have the example's half hour."""
    return {name: everybody[name] for name in ("ada", "ben")}


@pytest.fixture(scope="module")
def kernels(learners: dict[str, Learner]) -> dict[str, Kernel]:
    """A kernel of each, for lesson 1, watched."""
    found = dict(zip(learners, at_once(lambda learner: learner.open(LESSON), learners.values()), strict=True))
    at_once(lambda kernel: kernel.run(WATCH), found.values())
    return found


def at_once(act, those):
    with ThreadPoolExecutor() as pool:
        return list(pool.map(act, those))


def overlaps(one, other):
    """How many regions of one lie in part inside a region of the other, on the same GPU."""
    return sum(
        gpu == gpu_there and began < ended_there and began_there < ended
        for gpu, began, ended in one
        for gpu_there, began_there, ended_there in other
    )


def alternations(one, other):
    """How often the turn went over from one to the other."""
    order = [name for _, name in sorted([(r[1], "one") for r in one] + [(r[1], "other") for r in other])]
    return sum(first != second for first, second in pairwise(order))


# --- two learners at once -----------------------------------------------------------------------------


def test_two_learners_run_lesson_1_at_once_and_have_the_gpu_in_turns(kernels):
    """On a GPU the lesson's own measurements are among the turns. Without one nothing is timed: then
    they are regions of ten milliseconds, on a GPU that is there by name only.
    """

    def run(kernel: Kernel):
        learner = kernel.learner
        status, notebook = learner.at(learner.name, f"api/contents/{LESSON}")
        assert status == 200
        cells = [cell for cell in notebook["content"]["cells"] if cell["cell_type"] == "code"]
        if not device.has_gpu():
            kernel.run(fewer.CHECKS)
        began = time.monotonic()
        for cell in cells:
            kernel.run(cell["source"])
        return len(cells), began, time.monotonic(), json.loads(kernel.run("print(json.dumps(REGIONS))"))

    (cells, began, ended, mine), (as_many, began_too, ended_too, theirs) = at_once(run, kernels.values())
    assert cells == as_many > 10
    assert max(began, began_too) < min(ended, ended_too), "at once"
    assert bool(mine) == bool(theirs) == device.has_gpu()
    assert overlaps(mine, theirs) == 0
    mine, theirs = regions(kernels)
    assert len(mine) == len(theirs) == COUNT
    assert overlaps(mine, theirs) == 0
    assert alternations(mine, theirs) >= COUNT, "first come, first served"


def regions(kernels):
    cell = TURNS.format(start=time.time() + 1.0, count=COUNT)
    return at_once(lambda kernel: json.loads(kernel.run(cell)), kernels.values())


def test_where_learners_do_not_share_the_folder_their_turns_overlap(kernels):
    """As they would in a /tmp of each one's own: this is what the page warns of."""
    own = "import os, tempfile\ncommon, os.environ[lock.FOLDER] = os.environ[lock.FOLDER], tempfile.mkdtemp()"
    at_once(lambda kernel: kernel.run(own), kernels.values())
    try:
        assert overlaps(*regions(kernels)) > 0
    finally:
        at_once(lambda kernel: kernel.run("os.environ[lock.FOLDER] = common"), kernels.values())


# --- who gets in --------------------------------------------------------------------------------------


def test_nobody_gets_in_without_the_password_or_an_invitation(hub):
    assert not Learner(hub, "ada").log_in("a guess at it")
    assert not Learner(hub, "mallory").log_in()
    nobody = Learner(hub, "nobody")
    assert hubs.ask(f"{hub.url}/hub/api/users/ada", "")[0] == 403
    assert nobody.at("ada", "api/contents")[0] in (302, 403)


def test_hub_and_servers_listen_on_this_machine_only(hub, kernels):
    found = hubs.listening(hub)
    assert {address for address, _ in found} == {"127.0.0.1"}
    assert ("127.0.0.1", hub.port) in found and hubs.reachable("127.0.0.1", hub.port)
    outside = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in outside:
        assert address.startswith("127.") or not hubs.reachable(address, hub.port)


def test_no_port_shows_what_a_kernel_prints(hub, kernels):
    """Any user of the machine may listen at a port; a kernel's usual one speaks to all who do."""
    number = int(kernels["ada"].run("import os; print(os.getpid())"))
    ports = [found.laddr.port for found in psutil.Process(number).net_connections("inet") if not found.raddr]
    with zmq.Context() as context, context.socket(zmq.SUB) as listener:
        listener.subscribe(b"")
        listener.linger = 0
        for port in ports:
            listener.connect(f"tcp://127.0.0.1:{port}")
        for _ in range(20):
            kernels["ada"].run("print('between us')")
            assert not listener.poll(50), listener.recv_multipart()


ELSEWHERE = [
    ("GET", "api/contents/labkit"),
    ("GET", f"api/contents/{LESSON}"),
    ("GET", f"files/{LESSON}"),
    ("GET", "lab"),
    ("GET", "api/kernels"),
    ("GET", "api/sessions"),
    ("GET", "api/terminals"),
    ("POST", "api/kernels"),
    ("POST", "api/terminals"),
    ("PUT", "api/contents/labkit/planted.txt"),
    ("DELETE", f"api/contents/{LESSON}"),
]


@pytest.mark.parametrize(("method", "path"), ELSEWHERE)
def test_a_learners_token_is_refused_at_anothers_server(learners, method, path):
    ada, ben = learners.values()
    body = {"type": "file", "format": "text", "content": "ada was here"} if method == "PUT" else None
    body = {"name": "python3"} if (method, path) == ("POST", "api/kernels") else body
    assert ada.at("ben", path, method, body)[0] == 403
    if method == "GET":
        assert ben.at("ben", path)[0] == 200, "the page is there, and its owner gets it"
    assert (ben.home / LESSON).exists() and not (ben.home / "labkit/planted.txt").exists()


def test_a_learners_token_opens_nobody_elses_kernel(learners, kernels):
    ada, ben = learners.values()
    with pytest.raises(WebSocketBadStatusException) as refused:
        hubs.channels(ada, "ben", kernels["ben"].id)
    assert refused.value.status_code == 403
    hubs.channels(ben, "ben", kernels["ben"].id).close()


def test_a_learner_has_no_say_over_the_hub(hub, learners):
    ada = learners["ada"]
    api = f"{hub.url}/hub/api"
    assert hubs.ask(f"{api}/users/ben", ada.token)[0] == 404
    assert hubs.ask(f"{api}/users/ben/server", ada.token, "DELETE")[0] == 404
    assert hubs.ask(f"{api}/users/ben/tokens", ada.token, "POST", {})[0] in (403, 404)
    assert hubs.ask(f"{api}/shutdown", ada.token, "POST", {})[0] == 403
    status, users = hubs.ask(f"{api}/users", ada.token)
    assert status == 403 or [user["name"] for user in users] == ["ada"]


# --- files --------------------------------------------------------------------------------------------

SEES = """
import errno, os, pathlib, json
def tried(act):
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"
print(json.dumps([tried(act) for act in [{acts}]]))
"""


def tries(kernel: Kernel, *acts: str) -> list[str]:
    """What becomes of expressions in a kernel: done, or the name of the error."""
    return json.loads(kernel.run(SEES.format(acts=", ".join(f"lambda: {act}" for act in acts))))


@pytest.fixture
def apart(hub):
    if not hub.separate:
        pytest.skip(f"all learners are the same user of the system here: {hub.course.why_one}")


def test_neither_reads_the_others_files(apart, hub, learners, kernels):
    """Although the homes were made open to all. A file that all may read shows: it is for this reason."""
    public = hub.homes.parent / "public.txt"
    public.write_text("for all")
    for name, there in (("ada", "ben"), ("ben", "ada")):
        other = learners[there].home
        number = int(kernels[there].run("import os; print(os.getpid())"))
        run = Path(kernels[there].run("import ipykernel; print(ipykernel.get_connection_file())").strip())
        assert run.stat().st_uid == other.stat().st_uid
        assert tries(
            kernels[name],
            f"open({str(public)!r}).read()",
            f"open({str(learners[name].home / LESSON)!r}).read()",
            f"os.listdir({str(other)!r})",
            f"open({str(other / LESSON)!r}).read()",
            f"open({str(other / LESSON)!r}, 'a')",
            f"open({str(other / 'planted.txt')!r}, 'w')",
            f"open({str(run)!r}).read()",
            f"os.listdir({str(run.parent)!r})",
            f"open('/proc/{number}/environ').read()",
            f"os.kill({number}, 0)",
        ) == ["done", "done", *["EACCES"] * 7, "EPERM"]
    assert all(stat.S_IMODE(learner.home.stat().st_mode) == 0o700 for learner in learners.values())


def test_what_a_learner_makes_is_the_learners_alone(learners, kernels):
    kernels["ada"].run("import os; open('mine.txt', 'w').write('mine'); os.mkdir('folder')")
    kernels["ada"].run(
        "from labkit import places; places.write_text(places.Path('kept.txt').resolve(), 'mine')"
    )
    labkit = learners["ada"].home / "labkit"
    assert stat.S_IMODE((labkit / "mine.txt").stat().st_mode) == 0o600
    assert stat.S_IMODE((labkit / "kept.txt").stat().st_mode) == 0o600
    assert stat.S_IMODE((labkit / "folder").stat().st_mode) == 0o700


def test_learners_do_not_write_into_the_course(apart, hub, kernels):
    course = hub.course.folder
    assert tries(
        kernels["ada"],
        f"open({str(course / 'labkit' / 'clocks.py')!r}).read()",
        f"open({str(course / 'labkit' / 'clocks.py')!r}, 'a')",
        f"open({str(course / 'docs/jupyterhub/start')!r}, 'a')",
        f"open({str(course / 'planted.py')!r}, 'w')",
        f"os.rename({str(course / '.venv')!r}, {str(course / 'venv')!r})",
    ) == ["done", *["EACCES"] * 4]


def test_a_learner_takes_nobodys_place_in_the_queue(apart, hub, kernels):
    """All may queue in the folder, and nobody removes what is another's."""
    (hub.turns / "of-the-teacher").write_text("")
    assert tries(
        kernels["ada"],
        f"open({str(hub.turns / 'of-ada')!r}, 'w').close()",
        f"os.remove({str(hub.turns / 'of-ada')!r})",
        f"os.remove({str(hub.turns / 'of-the-teacher')!r})",
    ) == ["done", "done", "EPERM"]


def test_lessons_are_handed_out(hub, learners):
    for learner in learners.values():
        for lesson in sorted((hub.course.folder / "notebooks").glob("*.ipynb")):
            mine = learner.home / "labkit" / lesson.name
            assert mine.read_bytes() == lesson.read_bytes()
            assert stat.S_IMODE(mine.stat().st_mode) == 0o600


# --- what is idle ends --------------------------------------------------------------------------------


def test_an_idle_kernel_ends_although_its_page_is_open(idle, learners, kernels):
    owner = idle.learner

    def ended() -> bool:
        return owner.at(owner.name, "api/kernels") == (200, [])

    wait_for(ended, "the kernel ends", 3 * hubs.IDLE_S)
    _, others = learners["ada"].at("ada", "api/kernels")
    assert len(others) == 1, "half an hour is not over"


def test_the_culler_of_the_example_may_end_idle_servers(hub, everybody):
    """Its own command and its own rights, but for the hour."""
    example = (DOCS / "jupyterhub" / "jupyterhub_config.py").read_text()
    assert "jupyterhub_idle_culler" in example and "--timeout=3600" in example
    assert "ready" in json.dumps(hub.teacher("users")[1]), "servers are running"
    culler = subprocess.Popen(
        [sys.executable, "-m", "jupyterhub_idle_culler", "--timeout=1", "--cull-every=1"],
        env={
            **os.environ,
            "JUPYTERHUB_API_TOKEN": hubs.TEACHER,
            "JUPYTERHUB_API_URL": f"{hub.url}/hub/api",
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def gone() -> bool:
        _, users = hub.teacher("users")
        return not any(user["servers"] for user in users)

    try:
        wait_for(gone, "idle servers end", 60)
    finally:
        culler.terminate()
        culler.wait()


def test_hub_and_servers_know_every_setting(hub, learners):
    log = hub.log.read_text()
    assert "Using Spawner" in log
    for complaint in ("not recognized", "Unrecognized", "Bad config", "deprecated"):
        assert complaint not in log
