"""The suites of lesson 7: a norm, a linear recurrence, a recurrence with a norm at every step."""

from collections.abc import Iterable

from labkit import kernels, lessons, peers
from labkit import recurrent_works as work
from labkit.bench_plan import Part
from labkit.published import rms_norm_shapes
from labkit.sweeps import Contender, Shape

BOTH = ("forward", "backward")
BOTH_DTYPES = ("float32", "bfloat16")
LESSON = "07_recurrent_kernel"


def _shape(batch: int, time: int, width: int) -> Shape:
    return {"batch": batch, "time": time, "width": width}


FEW = (_shape(512, 64, 128), _shape(512, 64, 256), _shape(1024, 64, 512))


def _others(*left_out: Shape) -> tuple[Shape, ...]:
    """The published shapes that are not measured with all contenders already."""
    return tuple(shape for shape in rms_norm_shapes() if shape not in left_out)


def _widths(shapes: Iterable[Shape], *left_out: int) -> tuple[Shape, ...]:
    """The first shape of each width but those left out."""
    first = {shape["width"]: shape for shape in reversed(tuple(shapes))}
    return tuple(shape for width, shape in sorted(first.items()) if width not in left_out)


def rms_norm() -> list[Part]:
    """All but the published original at all published shapes, forward and backward; at three also that, and
    bfloat16."""
    lesson = lessons.load(LESSON)
    original = Contender("original", lesson.original_norm, work.RMS_NORM, dtypes=("float32",))
    norms = (
        Contender("F.rms_norm", work.rms_norm, work.RMS_NORM),
        Contender("torch.compile", work.rms_norm, work.RMS_NORM, compiled=True),
        Contender("Liger", peers.liger_rms_norm, work.RMS_NORM, peer="liger-kernel"),
        Contender("labkit", kernels.rms_norm, work.RMS_NORM),
    )
    return [
        Part((original, *norms), FEW, dtypes=BOTH_DTYPES, directions=BOTH),
        Part(norms, _others(*FEW), dtypes=("float32",), directions=BOTH),
    ]


def linear_recurrence() -> list[Part]:
    """Beside a loop, a tree and other packages' scans; ours and fla, step by step, at the published shapes;
    and a minimal GRU."""
    lesson = lessons.load(LESSON)
    timed = (*FEW[1:], _shape(64, 2048, 256))
    ours = Contender("labkit", kernels.linear_recurrence, work.LINEAR_RECURRENCE)
    short = {"time": (64,)}
    loop = Contender("eager loop", work.linear_recurrence, work.LINEAR_RECURRENCE, sizes=short)
    tree = Contender("tl.associative_scan", lesson.scanned, work.LINEAR_RECURRENCE)
    fla = Contender("fla, step by step", peers.fla_recurrence, work.LOG_RECURRENCE, peer="fla-core")
    chunks = Contender("fla, in chunks", peers.fla_chunked_recurrence, work.LOG_RECURRENCE, peer="fla-core")
    scan = Contender(
        "accelerated-scan",
        peers.accelerated_scan,
        work.LINEAR_RECURRENCE,
        peer="accelerated-scan",
        sizes={"time": (2048,)},
    )
    gates = (
        Contender("eager loop", work.min_gru, work.MIN_GRU, sizes=short),
        Contender("labkit", kernels.min_gru, work.MIN_GRU),
    )
    others = _others(*timed)
    # they tune themselves once for a width
    tuned = _widths(timed)
    further = _widths(others, *(shape["width"] for shape in tuned))
    return [
        Part(
            (loop, tree, fla, chunks, scan, ours),
            timed,
            dtypes=("float32",),
            tuning=(fla.name, chunks.name),
            tuned=tuned,
        ),
        Part((loop, fla, chunks, scan, ours), timed, dtypes=("float32",), directions=("backward",)),
        Part((ours,), timed, directions=BOTH),
        Part((fla, ours), others, dtypes=("float32",), directions=BOTH, tuning=(fla.name,), tuned=further),
        Part(gates, timed, "min_gru", dtypes=("float32",), directions=BOTH),
    ]


def rms_recurrence() -> list[Part]:
    """Beside a loop of PyTorch, and one that torch.compile unrolls; ours at the published shapes."""
    timed = (*FEW, _shape(64, 64, 512), _shape(1024, 16, 512))
    ours = Contender("labkit", kernels.rms_recurrence, work.RMS_RECURRENCE)
    loops = (
        Contender("eager loop", work.rms_recurrence, work.RMS_RECURRENCE, dtypes=("float32",)),
        Contender(
            "compiled loop",
            work.rms_recurrence,
            work.RMS_RECURRENCE,
            compiled=True,
            dtypes=("float32",),
            sizes={"time": (16,)},  # each step more takes longer to compile
        ),
    )
    return [
        Part((*loops, ours), timed, dtypes=BOTH_DTYPES, directions=BOTH),
        Part((ours,), _others(*timed), dtypes=("float32",), directions=BOTH),
    ]
