"""Names as torch.profiler gives them: shortened, and sorted by the work they say is done."""

import pytest

from labkit.measure import kernel_names


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
    assert kernel_names.shorten(full) == short
