"""Names as torch.profiler gives them: shortened, and sorted by the work they say is done."""

import pytest

from labkit.profiling import kernel_names


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


SORTS = {
    "matrix product": [
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_bias_TNT",
        "nvjet_hsh_64x8_64x16_4x1_v_bz_splitK_TNT",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_tn_align1>(cutlass_80_simt_sgemm::Params)",
        "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
        "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize64x64x16",
        "void magma_sgemmEx_kernel<float, float, float, true, false, 6, 4, 6, 3, 4>(int)",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, false>(int)",
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16>(int)",
    ],
    "reduction": [
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasLt::cublasSplitKParams<float>, int)",
        "void cublasLt::cublasSplitKParams...",
        "void cutlass::Kernel<cutlass::reduction::kernel::ReduceSplitK<cutlass::MatrixShape<4> > >(int)",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, float> >(int)",
    ],
    "copy": ["Memcpy DtoD (Device -> Device)", "Memset (Device)"],
    "other": [
        "void scal_kernel<float, cublasGemvTensorStridedBatched<float> >(int)",
        "memcpy32_post",
        "void at::native::elementwise_kernel<128, 4, at::native::MulFunctor<float> >(int)",
        "triton_poi_fused_addmm_gelu_mul_0",
        "somebodys_kernel(cutlass::Params)",
        "",
    ],
}


@pytest.mark.parametrize(("sort", "name"), [(sort, name) for sort, names in SORTS.items() for name in names])
def test_names_are_sorted(sort, name):
    assert kernel_names.kernel_kind(name) == sort


def test_operations_are_sorted():
    products = [
        name
        for name in ("addmm", "_addmm_activation", "mul", "addcmul")
        if kernel_names.operation_kind(name) == "matrix product"
    ]
    assert products == ["addmm", "_addmm_activation"]
