#include "core/kernels/cpu/dnnl_kernels.h"

#include <unordered_map>

#include "core/check.h"
#include "core/kernels/cpu/dnnl_compat.h"
#include "core/kernels/cpu/gemm.h"
#include "core/kernels/cpu/parallel.h"
#include "core/kernels/cpu/plans.h"
#include "core/kernels/layout.h"

namespace shardbook::kernels::cpu {

namespace {

using dnnl::memory;
using Plan = KernelContext::Plans::Plan;

memory::desc describe(memory::data_type type, std::int64_t batch,
                      std::int64_t rows, std::int64_t cols, std::int64_t stride,
                      std::int64_t row_stride, std::int64_t col_stride) {
  if (batch == 1) return {{rows, cols}, type, {row_stride, col_stride}};
  // A batch that shares one matrix has a batch dim of 1, which repeats.
  if (stride == 0) batch = 1, stride = rows * cols;
  return {{batch, rows, cols}, type, {stride, row_stride, col_stride}};
}

Plan make_plan(const dnnl::engine& engine, memory::data_type type,
               const MatmulArgs& args, bool with_bias) {
  Plan plan;
  plan.a = describe(type, args.batch, args.m, args.k, args.stride_a,
                    args.trans_a ? 1 : args.lda, args.trans_a ? args.lda : 1);
  plan.b = describe(type, args.batch, args.k, args.n, args.stride_b,
                    args.trans_b ? 1 : args.ldb, args.trans_b ? args.ldb : 1);
  plan.c =
      describe(type, args.batch, args.m, args.n, args.stride_c, args.ldc, 1);
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (args.accumulate) {
    dnnl::post_ops add;
    add.append_sum(1.0f);
    attributes.set_post_ops(add);
  }
  if (with_bias) {
    plan.bias = args.batch == 1
                    ? memory::desc({1, args.n}, type, {args.n, 1})
                    : memory::desc({1, 1, args.n}, type, {args.n, args.n, 1});
  }
  const dnnl::matmul::primitive_desc chosen =
      with_bias ? describe_primitive<dnnl::matmul>(engine, attributes, plan.a,
                                                   plan.b, plan.bias, plan.c)
                : describe_primitive<dnnl::matmul>(engine, attributes, plan.a,
                                                   plan.b, plan.c);
  plan.scratch = chosen.scratchpad_desc();
  plan.primitive = dnnl::matmul(chosen);
  return plan;
}

// The gradient of a weight with more outputs than inputs: oneDNN computes its
// transpose faster.
bool is_tall(const MatmulArgs& args) { return args.trans_a && args.m > args.n; }

// Over few rows, transposing the result costs more than it gains. Measured:
// 2048 x 512 over 64 rows at 136 GFLOP/s, and at 243 by our own loops; over 384
// rows at 217 and 236.
bool own_loops_are_faster(const MatmulArgs& args) {
  return is_tall(args) && args.k <= kBlockK;
}

// On plain row-major f32, oneDNN's GEMM is a tenth faster than its matmul
// primitive, which packs B anew for each block of rows. The primitive adds a
// bias at no cost. GEMM holds its own packing buffers.
bool gemm_is_faster(DType dtype, const MatmulArgs& args, bool has_bias) {
  return dtype == DType::kF32 && args.batch == 1 && !has_bias &&
         !(is_tall(args) && (args.accumulate || args.ldc != args.n));
}

// oneDNN 3.7 reads the wrong elements in a bf16 product with one row or one
// column when a leading dimension is larger than the row.
bool is_misread(DType dtype, const MatmulArgs& args) {
  return dtype == DType::kBF16 && (args.m == 1 || args.n == 1) &&
         (args.lda > (args.trans_a ? args.m : args.k) ||
          args.ldb > (args.trans_b ? args.k : args.n) || args.ldc > args.n);
}

void sgemm(bool trans_a, bool trans_b, std::int64_t m, std::int64_t n,
           std::int64_t k, const float* a, std::int64_t lda, const float* b,
           std::int64_t ldb, float beta, float* c, std::int64_t ldc) {
  const dnnl_status_t status =
      dnnl_sgemm(trans_a ? 'T' : 'N', trans_b ? 'T' : 'N', m, n, k, 1.0f, a,
                 lda, b, ldb, beta, c, ldc);
  SB_CHECK(status == dnnl_success, "matmul: oneDNN's GEMM failed with status ",
           static_cast<int>(status));
}

void gemm(KernelContext& context, const MatmulArgs& args, const float* a,
          const float* b, float* c) {
  if (!is_tall(args)) {
    return sgemm(args.trans_a, args.trans_b, args.m, args.n, args.k, a,
                 args.lda, b, args.ldb, args.accumulate ? 1.0f : 0.0f, c,
                 args.ldc);
  }
  Scratch turned(context, args.m * args.n * sizeof(float));
  sgemm(!args.trans_b, false, args.n, args.m, args.k, b, args.ldb, a, args.lda,
        0.0f, turned.as<float>(), args.m);
  transpose(context, DType::kF32, 1, args.n, args.m, turned.data(), c);
}

}  // namespace

bool matmul_dnnl(KernelContext& context, DType dtype, const MatmulArgs& args,
                 const void* a, const void* b, void* c, const void* bias) {
  if (dtype == DType::kF32 && own_loops_are_faster(args)) return false;
  if (gemm_is_faster(dtype, args, bias != nullptr)) {
    gemm(context, args, static_cast<const float*>(a),
         static_cast<const float*>(b), static_cast<float*>(c));
    return true;
  }
  if (is_misread(dtype, args)) return false;
  KernelContext::Plans& plans = context.plans();
  const KernelContext::Plans::Key key = {
      static_cast<std::int64_t>(dtype),
      args.batch,
      args.m,
      args.n,
      args.k,
      args.lda,
      args.ldb,
      args.ldc,
      args.stride_a,
      args.stride_b,
      args.stride_c,
      (args.trans_a ? 1 : 0) | (args.trans_b ? 2 : 0) |
          (args.accumulate ? 4 : 0) | (bias != nullptr ? 8 : 0),
      max_threads(),
      0};
  const Plan& plan = plans.find_or_make("matmul", plans.matmuls, key, [&] {
    return make_plan(plans.engine, plans.type_of(dtype), args, bias != nullptr);
  });
  if (!plan.primitive) return false;

  Scratch scratch(context, plan.scratch.get_size());
  const auto wrap = [&](const memory::desc& desc, const void* data) {
    return memory(desc, plans.engine, const_cast<void*>(data));
  };
  std::unordered_map<int, memory> arguments = {
      {DNNL_ARG_SRC, wrap(plan.a, a)},
      {DNNL_ARG_WEIGHTS, wrap(plan.b, b)},
      {DNNL_ARG_DST, wrap(plan.c, c)},
      {DNNL_ARG_SCRATCHPAD, wrap(plan.scratch, scratch.data())}};
  if (bias != nullptr) arguments[DNNL_ARG_BIAS] = wrap(plan.bias, bias);
  plan.primitive.execute(plans.stream, arguments);
  plans.stream.wait();
  return true;
}

}  // namespace shardbook::kernels::cpu
