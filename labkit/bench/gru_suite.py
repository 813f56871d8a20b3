"""The suite of a GRU layer; the table of suites is in suites.py."""

from labkit import kernels
from labkit.bench.suite_part import Ranges, SuitePart
from labkit.measure.contender import Contender
from labkit.workloads import gru as layer
from labkit.workloads import peers

STEPS = 64
SIZES = {64: (16, 128, 512, 1024, 2048), 128: (16, 128, 512, 2048, 4096), 256: (64,)}
"""Numbers of sequences for each width, all of STEPS steps. 256 features take a launch for each step."""
FEW_STEPS = 16
"""Steps that torch.compile writes out one by one; each more takes longer to compile."""


def gru() -> list[SuitePart]:
    """A whole layer, forward and both passes, beside cuDNN's, TorchRL's and a compiled loop of PyTorch."""
    ours = Contender("labkit", kernels.gru, layer.GRU)
    cudnn = Contender("cuDNN, time first", layer.library_gru_by_time, layer.GRU_BY_TIME)
    batch_first = Contender("cuDNN, batch first", layer.library_gru, layer.GRU)
    loop = Contender("compiled loop", layer.gru, layer.GRU, compiled=True, sizes={"time": (FEW_STEPS,)})
    # it tunes itself for each number of steps, with two dozen kernels to compile for each width and dtype
    sizes, dtypes = {"time": (FEW_STEPS, STEPS)}, ("bfloat16", "float32")  # TorchRL names no other
    torchrl = Contender("TorchRL", peers.torchrl_gru, layer.GRU, peer="torchrl", dtypes=dtypes, sizes=sizes)
    who, directions = (loop, batch_first, cudnn, torchrl, ours), ("forward", "forward_backward")
    fixed = tuple({"batch": n, "time": STEPS, "width": width} for width, many in SIZES.items() for n in many)
    few = ({"batch": 512, "time": FEW_STEPS, "width": 128},)
    ranges: Ranges = {"batch": (16, 4096, 1), "time": (1, 512, 1), "width": (16, 128, 1)}
    return [
        SuitePart(who, (*few, *fixed), directions=directions, ranges=ranges),
        SuitePart((cudnn, torchrl, ours), fixed[1:10:3], "", ("float16", "float32"), directions),
    ]
