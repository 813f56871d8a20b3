"""The suite of lesson 9: a small recurrent network, by PyTorch, its compiler, and the lessons' kernels."""

from labkit import lessons
from labkit import network_works as work
from labkit.bench_plan import Part
from labkit.sweeps import Contender, Shape

BOTH_DTYPES = ("float32", "bfloat16")
LESSON = "09_microsecond_ledger"


def _shape(batch: int, time: int = 64) -> Shape:
    return {"batch": batch, "time": time, "width": 128}


def ledger() -> list[Part]:
    """Device time; a pass as Python sees it; the compiled loop, over few steps; forward with backward."""
    lesson = lessons.load(LESSON)
    plain, operators = lesson.network(), lesson.network(cell=lesson.cell_of_operators)
    kernels = lesson.network(**lesson.PARTS)
    eager = Contender("eager", plain, work.NETWORK)
    compiled = Contender("compiled, recurrences as operators", operators, work.NETWORK, compiled=True)
    apart = Contender("labkit, eight kernels", kernels, work.NETWORK)
    labkit = Contender("labkit", lesson.whole, work.NETWORK)
    graphed = (
        Contender("eager, in a graph", lesson.replayed(plain), work.NETWORK),
        Contender("reduce-overhead", operators, work.NETWORK, compiled=True, mode="reduce-overhead"),
        Contender("labkit, in a graph", lesson.replayed(lesson.whole), work.NETWORK),
    )
    loop = Contender("compiled loop", plain, work.NETWORK, compiled=True)
    many, few = _shape(1024), _shape(64)
    return [
        Part((eager, compiled, apart, labkit), (many, few), dtypes=BOTH_DTYPES, cache="warm"),
        Part((eager, compiled, labkit, *graphed), (many, few), "host", clocks=("host",), cache="warm"),
        Part((loop, labkit), (_shape(1024, 16),), "short", cache="warm"),
        Part(
            (eager, compiled, labkit),
            (many,),
            "training",
            directions=("backward", "forward_backward"),
            cache="warm",
        ),
    ]
