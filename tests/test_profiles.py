"""Profiles from a trace with torch.profiler's field names, and from counted launches."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # decided when triton is imported, below

import json
from pathlib import Path

import pytest
import triton
import triton.language as tl

from labkit import device, profiles

TRACE = Path(__file__).with_name("data") / "chrome_trace.json"
"""Made by hand: a product, a sum, a Triton kernel on another stream, and a graph of two nodes."""


interpreted = pytest.mark.skipif(
    not device.interpreting(), reason="Profiles without times need interpreted kernels (TRITON_INTERPRET=1)."
)


@triton.jit
def fill(x_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + offsets, 1.0, mask=offsets < n)


@pytest.fixture
def traced():
    return profiles.from_trace(json.loads(TRACE.read_text())["traceEvents"])


def test_kernels_are_in_order_and_start_with_the_hosts_first_event(traced):
    assert [kernel.name for kernel in traced.kernels] == [
        "elementwise_kernel<128, 4, MulFunctor>",
        "elementwise_kernel<128, 4, CUDAFunctor_add>",
        "affine",
        "affine",
        "Memcpy DtoD",
    ]
    first, *_, copy = traced.kernels
    assert (first.start_us, first.duration_us, first.stream) == (10.5, 20.0, 7)
    assert (first.grid, first.block) == ((80, 1, 1), (128, 1, 1))
    assert first.full_name.startswith(
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl"
    )
    assert (copy.grid, copy.block) == ((), ())


def test_gaps_span_and_busy_time_know_overlap(traced):
    assert traced.gaps == [2.0, 0.0, 10.0, 2.0]
    assert traced.span_us == 106.0
    assert traced.busy_us == 92.0
    assert traced.timed


def test_launches_are_what_started_work_and_only_outermost_operations_are_kept(traced):
    assert traced.launches == 4  # five things ran; the graph started two
    assert [event.name for event in traced.host] == [
        "cudaLaunchKernel",
        "cudaLaunchKernel",
        "cuLaunchKernelEx",
        "cudaGraphLaunch",
    ]
    assert [event.name for event in traced.operations] == ["aten::mul", "aten::add"]
    assert (traced.operations[0].start_us, traced.operations[0].duration_us) == (0.0, 12.0)
    assert (traced.host[0].start_us, traced.host[0].duration_us) == (4.0, 5.0)


def test_the_table_adds_up_equal_kernels(traced):
    table = traced.table()
    assert list(table.columns) == ["kernel", "count", "us", "share"]
    assert list(table["count"]) == [1, 1, 2, 1]
    assert list(table["us"]) == [20.0, 10.0, 60.0, 4.0]
    assert table["share"].sum() == pytest.approx(1)


def test_kernels_with_one_short_name_stay_apart_in_the_table():
    event = {"ph": "X", "cat": "kernel", "tid": 7, "dur": 1.0, "args": {"stream": 7, "correlation": 1}}
    names = ["void a::k<float, 4>(int)", "void a::k<double, 4>(int)", "void a::k<float, 4>(int)"]
    profile = profiles.from_trace({**event, "name": name, "ts": float(i)} for i, name in enumerate(names))
    assert list(profile.table()["kernel"]) == ["k<4>", "k<4>"]
    assert list(profile.table()["count"]) == [2, 1]


def test_a_trace_in_which_nothing_ran():
    profile = profiles.from_trace([])
    assert (profile.launches, profile.gaps, profile.span_us, profile.busy_us) == (0, [], 0.0, 0.0)
    assert len(profile.table()) == 0


@interpreted
def test_without_a_gpu_there_are_launches_and_no_times():
    x, weight, bias = torch.randn(8, 160), torch.randn(160), torch.randn(160)

    def call():
        y = x * weight + bias
        fill[(2,)](y, y.numel(), BLOCK=1024)
        return y * 2

    profile = profiles.profile(call)
    assert not profile.timed
    assert profile.launches == 4
    assert (profile.kernels, profile.host, profile.gaps) == ([], [], [])
    assert profile.span_us is None and profile.busy_us is None
    table = profile.table().set_index("operation")
    assert list(table.index) == ["mul", "add", "fill"]
    assert table.loc["mul", "count"] == 2
    assert table.loc["fill", "programs"] == 2
    assert table.loc["fill", "bytes written"] == 8 * 160 * 4
    assert not any("us" in column for column in table.columns)


@interpreted
def test_linear_is_one_launch_and_affine_two():
    x, weight, bias = torch.randn(8, 160), torch.randn(160), torch.randn(160)
    matrix = torch.randn(160, 160)
    assert profiles.profile(lambda: x * weight + bias).launches == 2
    assert profiles.profile(lambda: torch.nn.functional.linear(x, matrix, bias)).launches == 1


@pytest.mark.parametrize(
    ("full", "short"),
    [
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::AUnaryFunctor<...>>",
            "vectorized_elementwise_kernel<4, AUnaryFunctor>",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
            "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)",
            "vectorized_elementwise_kernel<4, CUDAFunctor_add>",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::sigmoid_kernel_cuda("
            "at::TensorIteratorBase&)::{lambda()#2}::operator()() const::{lambda(float)#1}, "
            "std::array<char*, 2ul> >(int, std::array<char*, 2ul>)",
            "vectorized_elementwise_kernel<4, sigmoid_kernel_cuda>",
        ),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, "
            "at::native::func_wrapper_t<float, at::native::sum_functor<float, float, float>"
            "::operator()(at::TensorIterator&)::{lambda(float, float)#1}>, unsigned int, float, 4, 4> >"
            "(at::native::ReduceOp<float>)",
            "reduce_kernel<512, 1, sum_functor>",
        ),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<float>(int)",
            "multi_tensor_apply_kernel",
        ),
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm>(int)",
            "Kernel2<cutlass_80_tensorop_s1688gemm>",
        ),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT"),
        ("triton_poi_fused_add_mul_0", "triton_poi_fused_add_mul_0"),
        ("Memset (Device)", "Memset"),
    ],
)
def test_names_are_shortened(full, short):
    assert profiles.shorten(full) == short


def test_the_profilers_chatter_is_held_back_and_other_messages_are_not(capfd):
    with profiles._without_profiler_chatter():
        os.write(2, b"USDT:2026 profiler_start\nout of luck\n")
    assert capfd.readouterr().err == "out of luck\n"


@pytest.mark.skipif(not device.has_gpu(), reason="Recording real kernels needs a GPU.")
def test_a_real_profile_on_a_gpu():
    x, weight, bias = (torch.randn(n, 160, device="cuda") for n in (256, 1, 1))
    profile = profiles.profile(lambda: x * weight + bias)
    assert profile.timed and len(profile.kernels) == profile.launches == 2
    assert all(kernel.duration_us > 0 for kernel in profile.kernels)
