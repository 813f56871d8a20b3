"""Profiles from a trace with torch.profiler's field names, and the names of kernels, shortened."""

import itertools
import json
import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import labkit
from labkit.measure import clocks, profiles

TRACE = Path(__file__).parents[1] / "data" / "chrome_trace.json"
"""Made by hand: a product, a sum, a Triton kernel on another stream, and a graph of two nodes."""


def test_a_trace_tells_what_ran_on_the_device_in_order():
    events = json.loads(TRACE.read_text())["traceEvents"]
    product, add = (f"elementwise_kernel<128, 4, {functor}>" for functor in ("MulFunctor", "CUDAFunctor_add"))
    ran = [(product, 20.0), (add, 10.0), ("affine", 30.0), ("affine", 30.0), ("Memcpy DtoD", 4.0)]
    assert profiles.from_trace(events) == ran
    assert profiles.from_trace([]) == []


def ran(*names, us=1.5):
    return [(name, us) for name in names]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_of_three_profiles_the_undisturbed_one_of_the_usual_kernels_is_shown(monkeypatch, order):
    """Kernels took longer, or were missed: not even if two of three were disturbed."""
    usual, fewer, more, long = ran("a", "b"), ran("b"), ran("a", "b", "c"), ran("a", "b", us=9.0)
    calls = []

    def shown(*three):
        """The one that is shown when these are taken in this order."""
        left = [three[number] for number in order]
        monkeypatch.setattr(profiles, "_trace", lambda call: left.pop(0))
        return profiles.profile(lambda: calls.append("warm-up"))

    monkeypatch.setattr(profiles, "from_trace", lambda events: events)
    for one, other in ((long, long), (long, fewer), (long, more)):
        assert shown(one, usual, other) == usual
    assert shown(fewer, usual, more) == more, "no two alike"
    assert len(calls) == 4 * profiles.WARMUPS


@pytest.mark.filterwarnings("ignore:CUDA is not available:UserWarning")
def test_one_call_is_traced_while_the_gpu_is_locked(monkeypatch):
    held = []

    @contextmanager
    def locked():
        held.append(True)
        yield
        held.pop()

    monkeypatch.setattr("labkit.gpu.locked", locked)
    monkeypatch.setenv("TEARDOWN_CUPTI", "0")
    monkeypatch.setenv("DISABLE_CUPTI_LAZY_REINIT", "1")
    seen = []

    def call():
        seen.append((bool(held), os.environ["TEARDOWN_CUPTI"]))
        for _ in seen:
            torch.ones(3).sigmoid()

    events = profiles._trace(call)
    assert seen == [(True, "1")] * 2, "the profiler drops one and keeps one"
    assert [event["name"] for event in events].count("aten::sigmoid") == 2
    assert "DISABLE_CUPTI_LAZY_REINIT" not in os.environ, "it leaves afterwards"


@pytest.mark.skipif(not labkit.gpu.available(), reason="The profiler watches launches on a GPU only.")
def test_launches_cost_the_host_no_more_after_a_profile():
    x = torch.randn(256, 160, device="cuda")

    def call():
        for _ in range(50):
            x.add(1)

    def host_us():
        """The least of several: others may share the host's cores for seconds."""
        jobs = {"call": clocks.TimedCall(call)}
        return min(clocks.measure(jobs, clock="host", cache="warm")["call"].median_us for _ in range(5))

    before, profile = host_us(), profiles.profile(call)
    assert len(profile) == 50 and all(us > 0 for _, us in profile)
    assert host_us() < 1.2 * before


@pytest.mark.parametrize(
    ("full", "short"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, at::native::AUnaryFunctor<...>>",
         "vectorized_elementwise_kernel<4, AUnaryFunctor>"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
         "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)",
         "vectorized_elementwise_kernel<4, CUDAFunctor_add>"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::sigmoid_kernel_cuda("
         "at::TensorIteratorBase&)::{lambda()#2}::operator()() const::{lambda(float)#1}, "
         "std::array<char*, 2ul> >(int, std::array<char*, 2ul>)",
         "vectorized_elementwise_kernel<4, sigmoid_kernel_cuda>"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, "
         "at::native::func_wrapper_t<float, at::native::sum_functor<float, float, float>"
         "::operator()(at::TensorIterator&)::{lambda(float, float)#1}>, unsigned int, float, 4, 4> >"
         "(at::native::ReduceOp<float>)",
         "reduce_kernel<512, 1, sum_functor>"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<float>(int)",
         "multi_tensor_apply_kernel"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm>(int)",
         "Kernel2<cutlass_80_tensorop_s1688gemm>"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT"),
        ("triton_poi_fused_add_mul_0", "triton_poi_fused_add_mul_0"),
        ("Memset (Device)", "Memset"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16, 7, "
         "cublasGemvParamsEx<int, cublasGemvTensorStridedBatched<float const>, float> >(int)",
         "gemvx::kernel<__nv_bfloat16, 7, cublasGemvParamsEx>"),
    ],
)  # fmt: skip
def test_names_are_shortened(full, short):
    assert profiles.shorten(full) == short
