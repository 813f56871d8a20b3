"""Names as torch.profiler gives them: shortened, and sorted by the work they say is done."""

import pytest

from labkit import kernel_names


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
        (
            "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16, 7, "
            "cublasGemvParamsEx<int, cublasGemvTensorStridedBatched<float const>, float> >(int)",
            "gemvx::kernel<__nv_bfloat16, 7, cublasGemvParamsEx>",
        ),
    ],
)
def test_names_are_shortened(full, short):
    assert kernel_names.shorten(full) == short


@pytest.mark.parametrize(
    ("name", "sort"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_bias_TNT", "matrix product"),
        ("nvjet_hsh_64x8_64x16_4x1_v_bz_splitK_TNT", "matrix product"),
        (
            "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, "
            "true, false, false>(cublasLt::cublasSplitKParams<float>, float const*, __nv_bfloat16 const*)",
            "reduction",
        ),
        ("void cublasLt::cublasSplitKParams...", "reduction"),
        (
            "void cutlass::Kernel<cutlass::reduction::kernel::ReduceSplitK<cutlass::MatrixShape<4> > >(int)",
            "reduction",
        ),
        (
            "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_tn_align1>"
            "(cutlass_80_simt_sgemm_128x32_8x5_tn_align1::Params)",
            "matrix product",
        ),
        ("ampere_sgemm_128x64_tn", "matrix product"),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", "matrix product"),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize64x64x16", "matrix product"),
        ("void magma_sgemmEx_kernel<float, float, float, true, false, 6, 4, 6, 3, 4>(int)", "matrix product"),
        (
            "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, false, "
            "cublasGemvParamsEx<int, cublasGemvTensorStridedBatched<float const> > >(int)",
            "matrix product",
        ),
        (
            "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16>(int)",
            "matrix product",
        ),
        ("void scal_kernel<float, cublasGemvTensorStridedBatched<float> >(int)", "other"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("Memset (Device)", "copy"),
        ("memcpy32_post", "other"),
        (
            "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<"
            "at::native::BinaryFunctor<float, float, float, at::native::MulFunctor<float> > > >(int)",
            "other",
        ),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, float> >(int)", "reduction"),
        ("triton_poi_fused_addmm_gelu_mul_0", "other"),
        ("somebodys_kernel(cutlass::Params)", "other"),
        ("", "other"),
    ],
)
def test_names_are_sorted(name, sort):
    assert kernel_names.sort(name) == sort


@pytest.mark.parametrize(
    ("name", "sort"),
    [
        ("addmm", "matrix product"),
        ("_addmm_activation", "matrix product"),
        ("mul", "other"),
        ("addcmul", "other"),
    ],
)
def test_operations_are_sorted(name, sort):
    assert kernel_names.sort_of_operation(name) == sort
