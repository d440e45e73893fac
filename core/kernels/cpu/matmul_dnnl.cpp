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
                      std::int64_t rows, std::int64_t cols, bool transposed) {
  const std::int64_t row_stride = transposed ? 1 : cols,
                     col_stride = transposed ? rows : 1;
  if (batch == 1) return {{rows, cols}, type, {row_stride, col_stride}};
  return {{batch, rows, cols}, type, {rows * cols, row_stride, col_stride}};
}

Plan make_plan(const dnnl::engine& engine, memory::data_type type,
               const MatmulArgs& args, bool with_bias) {
  Plan plan;
  plan.a = describe(type, args.batch, args.m, args.k, args.trans_a);
  plan.b = describe(type, args.batch, args.k, args.n, args.trans_b);
  plan.c = describe(type, args.batch, args.m, args.n, false);
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (args.resume) {
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
         !(is_tall(args) && args.resume);
}

void sgemm(bool trans_a, bool trans_b, std::int64_t m, std::int64_t n,
           std::int64_t k, const float* a, const float* b, float beta,
           float* c) {
  const dnnl_status_t status =
      dnnl_sgemm(trans_a ? 'T' : 'N', trans_b ? 'T' : 'N', m, n, k, 1.0f, a,
                 trans_a ? m : k, b, trans_b ? k : n, beta, c, n);
  SB_CHECK(status == dnnl_success, "matmul: oneDNN's GEMM failed with status ",
           static_cast<int>(status));
}

void gemm(KernelContext& context, const MatmulArgs& args, const float* a,
          const float* b, float* c) {
  if (!is_tall(args)) {
    return sgemm(args.trans_a, args.trans_b, args.m, args.n, args.k, a, b,
                 args.resume ? 1.0f : 0.0f, c);
  }
  Scratch turned(context, args.m * args.n * sizeof(float));
  sgemm(!args.trans_b, false, args.n, args.m, args.k, b, a, 0.0f,
        turned.as<float>());
  permute(context, DType::kF32, {args.n, args.m}, {1, 0}, turned.data(), c);
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
  KernelContext::Plans& plans = context.plans();
  const KernelContext::Plans::Key key = {
      static_cast<std::int64_t>(dtype),
      args.batch,
      args.m,
      args.n,
      args.k,
      (args.trans_a ? 1 : 0) | (args.trans_b ? 2 : 0) | (args.resume ? 4 : 0) |
          (bias != nullptr ? 8 : 0),
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
