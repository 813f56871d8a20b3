"""The profiles that a recorded device left: what is read, and what is refused."""

import pytest

from labkit import paths
from labkit.measure import rows
from labkit.profiling import recorded_profiles
from labkit.profiling.recorded_profiles import HostEvent, KernelEvent

MUL = "void at::native::elementwise_kernel<128, 4, at::native::BinaryFunctor<float, MulFunctor>>(int)"
TRACE = {
    "kernels": {"what": [["mul", MUL], ["Memcpy", "Memcpy DtoD"]], "when": [[0, 10.5, 20.25], [1, 40, 1.5]]},
    "host": {"what": [["cudaLaunchKernel"]], "when": [[0, 0.0, 4.125]]},
}
KERNELS = [KernelEvent("mul", MUL, 10.5, 20.25), KernelEvent("Memcpy", "Memcpy DtoD", 40.0, 1.5)]
HOST = [HostEvent("cudaLaunchKernel", 0.0, 4.125)]


def test_the_first_device_that_has_a_profile_gives_it(own_folders):
    assert recorded_profiles.recorded_profile("toy/eager") is None
    for device, names in {"a10": ["toy/fused"], "h200": ["toy/eager", "toy/fused"]}.items():
        same = {"clock": "profiler", "cache": "", "kind": "recorded", "device": device, "trace": TRACE}
        found = [rows.Row(f"profile/{name}", "", "", "", {}, **same) for name in names]
        rows.write(paths.RECORDED / device / "old" / "toy.jsonl", found)
    assert recorded_profiles.recorded_profile("toy/eager").device == "h200"
    assert recorded_profiles.recorded_profile("toy/fused").device == "a10"
    assert recorded_profiles.recorded_profile("toy") is None


@pytest.mark.parametrize(
    "damaged",
    [
        {"kernels": None},
        {"host": None},
        {"kernels": []},
        {"host": {"what": [["cudaLaunchKernel"]], "when": [[9, 1.0, 1.0]]}},
        {"host": {"what": [["cudaLaunchKernel"]], "when": [[0, "soon", 1.0]]}},
        {"kernels": {"what": [["mul", MUL, 7, 80, [1]]], "when": [[0, 1.0, 1.0]]}},
        {"kernels": {"what": [["mul", MUL, 7, [1]]], "when": [[0, 1.0, 1.0]]}},
    ],
    ids=str,
)
def test_a_damaged_profile_is_refused(damaged):
    assert recorded_profiles.decode(TRACE) == (KERNELS, HOST)
    with pytest.raises(ValueError, match="not a profile"):
        recorded_profiles.decode(TRACE | damaged)
