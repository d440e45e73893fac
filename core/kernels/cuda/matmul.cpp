// Matrix products by cuBLASLt, and their epilogues.

#include "core/kernels/matmul.h"

#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "core/check.h"
#include "core/kernels/cuda/device_state.h"
#include "core/kernels/cuda/matmul_layout.h"
#include "core/kernels/cuda/owner.h"
#include "core/kernels/cuda/padding.h"
#include "core/kernels/cuda/status_check.h"
#include "core/kernels/elementwise.h"
#include "core/kernels/matmul_args.h"
#include "core/kernels/matmul_gelu.h"

namespace shardbook::kernels::cuda {

namespace {

#define SHARDBOOK_CUBLAS(call, ...)                                        \
  do {                                                                     \
    const cublasStatus_t cublas_status_ = (call);                          \
    SB_CHECK(cublas_status_ == CUBLAS_STATUS_SUCCESS, "cuBLASLt: ", #call, \
             " failed: ", cublasLtGetStatusName(cublas_status_), "; ",     \
             __VA_ARGS__);                                                 \
  } while (false)

// A product as error messages name it.
std::string text(DType dtype, const MatmulArgs& x) {
  const auto number = [](std::int64_t n) { return std::to_string(n); };
  return std::string("matmul of ") + dtype_name(dtype) + ", batch " +
         number(x.batch) + ", m " + number(x.m) + ", n " + number(x.n) +
         ", k " + number(x.k) + (x.trans_a ? ", A transposed" : "") +
         (x.trans_b ? ", B transposed" : "");
}

cudaDataType_t data_type(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return CUDA_R_64F;
    case DType::kF32:
      return CUDA_R_32F;
    case DType::kBF16:
      return CUDA_R_16BF;
    case DType::kF16:
      return CUDA_R_16F;
    default:
      SB_FAIL("matmul: dtype ", dtype_name(dtype),
              "; give f64, f32, bf16 or f16");
  }
}

// Objects of cuBLASLt.
using Handle = Owner<cublasLtHandle_t, cublasLtDestroy>;
using Description = Owner<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Owner<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference =
    Owner<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

// A product that cuBLASLt has chosen an algorithm for, or has none for.
struct Plan {
  Description description;
  Layout left, right, c;
  cublasLtMatmulAlgo_t algorithm = {};
  std::size_t workspace = 0;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  bool is_chosen = false;
};

// All that the choice of an algorithm depends on.
using Key = std::array<std::int64_t, 12>;

struct Products {
  Handle handle;
  std::size_t most_workspace = 0;
  std::map<Key, Plan> plans;
};

Products& products(KernelContext& context) {
  CudaState& state = cuda_state(context);
  if (state.matmul == nullptr) {
    refuse_capture(context,
                   "the first product of a rank starts cuBLASLt; run the work "
                   "once before");
    auto made = std::make_shared<Products>();
    cublasLtHandle_t handle = nullptr;
    SHARDBOOK_CUBLAS(cublasLtCreate(&handle), "the handle of a rank");
    made->handle.reset(handle);
    int device = 0, major = 0;
    SHARDBOOK_CUDA(cudaGetDevice(&device));
    SHARDBOOK_CUDA(cudaDeviceGetAttribute(
                       &major, cudaDevAttrComputeCapabilityMajor, device),
                   "device ", device);
    // NVIDIA's advice: 32 MiB from Hopper on, 4 MiB before.
    made->most_workspace = std::size_t{major >= 9 ? 32u : 4u} << 20;
    state.matmul = made;
  }
  return *static_cast<Products*>(state.matmul.get());
}

// The largest power of two up to 16 that divides an address.
std::uint32_t alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer) | 16;
  return static_cast<std::uint32_t>(address & (~address + 1));
}

template <typename T>
void set(cublasLtMatmulDesc_t description,
         cublasLtMatmulDescAttributes_t attribute, T value) {
  SHARDBOOK_CUBLAS(cublasLtMatmulDescSetAttribute(description, attribute,
                                                  &value, sizeof(value)),
                   "attribute ", static_cast<int>(attribute));
}
template <typename T>
void set(cublasLtMatmulPreference_t preference,
         cublasLtMatmulPreferenceAttributes_t attribute, T value) {
  SHARDBOOK_CUBLAS(cublasLtMatmulPreferenceSetAttribute(preference, attribute,
                                                        &value, sizeof(value)),
                   "attribute ", static_cast<int>(attribute));
}

Layout layout_of(cudaDataType_t type, const ColumnMajor& x,
                 std::int64_t batch) {
  cublasLtMatrixLayout_t layout = nullptr;
  SHARDBOOK_CUBLAS(cublasLtMatrixLayoutCreate(
                       &layout, type, static_cast<std::uint64_t>(x.rows),
                       static_cast<std::uint64_t>(x.cols), x.ld),
                   "rows ", x.rows, ", cols ", x.cols, ", ld ", x.ld);
  Layout owner(layout);
  const auto count = static_cast<std::int32_t>(batch);
  SHARDBOOK_CUBLAS(
      cublasLtMatrixLayoutSetAttribute(
          layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof(count)),
      "batch ", batch);
  SHARDBOOK_CUBLAS(cublasLtMatrixLayoutSetAttribute(
                       layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                       &x.stride, sizeof(x.stride)),
                   "stride ", x.stride);
  return owner;
}

cublasComputeType_t compute_type(const KernelContext& context, DType dtype) {
  if (dtype == DType::kF64) return CUBLAS_COMPUTE_64F;
  return dtype == DType::kF32 && context.allow_tf32
             ? CUBLAS_COMPUTE_32F_FAST_TF32
             : CUBLAS_COMPUTE_32F;
}

struct Pointers {
  const void* left;
  const void* right;
  void* c;
  /// The bias to add, or where to write the bias's gradient, or null.
  const void* bias;
  /// The input of GELU, [m, n] as C, or null.
  const void* pre = nullptr;
};

void set_pointers(cublasLtMatmulDesc_t description, cublasLtEpilogue_t epilogue,
                  const Pointers& x) {
  if (epilogue == CUBLASLT_EPILOGUE_DEFAULT) return;
  if (x.bias != nullptr) {
    set(description, CUBLASLT_MATMUL_DESC_BIAS_POINTER, x.bias);
  }
  if (x.pre != nullptr) {
    set(description, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, x.pre);
  }
}

// False when cuBLASLt knows no algorithm.
bool choose(KernelContext& context, Products& all, DType dtype,
            const MatmulArgs& args, const Pointers& x,
            cublasLtEpilogue_t epilogue, Plan* plan) {
  const ColumnMajorProduct product = column_major(args);
  const cudaDataType_t type = data_type(dtype);
  cublasLtMatmulDesc_t description = nullptr;
  SHARDBOOK_CUBLAS(
      cublasLtMatmulDescCreate(&description, compute_type(context, dtype),
                               dtype == DType::kF64 ? CUDA_R_64F : CUDA_R_32F),
      text(dtype, args));
  plan->description.reset(description);
  const auto operation = [](const ColumnMajor& operand) {
    return operand.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  };
  set(description, CUBLASLT_MATMUL_DESC_TRANSA, operation(product.left));
  set(description, CUBLASLT_MATMUL_DESC_TRANSB, operation(product.right));
  const bool is_plain = epilogue == CUBLASLT_EPILOGUE_DEFAULT;
  set(description, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
  set_pointers(description, epilogue, x);
  if (!is_plain && x.bias != nullptr) {
    set(description, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
        static_cast<std::int32_t>(type));
  }
  if (!is_plain && x.pre != nullptr) {
    set(description, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, args.n);
  }
  plan->epilogue = epilogue;
  plan->left = layout_of(type, product.left, args.batch);
  plan->right = layout_of(type, product.right, args.batch);
  plan->c = layout_of(type, product.c, args.batch);

  cublasLtMatmulPreference_t made = nullptr;
  SHARDBOOK_CUBLAS(cublasLtMatmulPreferenceCreate(&made), text(dtype, args));
  const Preference preference(made);
  set(made, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, all.most_workspace);
  set(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(x.left));
  set(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(x.right));
  set(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(x.c));
  set(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(x.c));
  // Partial sums over k add in f32, too; deterministic mode allows none.
  const bool is_narrow = dtype == DType::kBF16 || dtype == DType::kF16;
  if (context.deterministic || is_narrow) {
    set(made, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        static_cast<std::uint32_t>(
            context.deterministic ? CUBLASLT_REDUCTION_SCHEME_NONE
                                  : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  }
  cublasLtMatmulHeuristicResult_t found = {};
  int count = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      all.handle.get(), description, plan->left.get(), plan->right.get(),
      plan->c.get(), plan->c.get(), made, 1, &found, &count);
  // With an epilogue, any error means no: the caller has another way.
  if (status == CUBLAS_STATUS_NOT_SUPPORTED ||
      (!is_plain && status != CUBLAS_STATUS_SUCCESS)) {
    return false;
  }
  SHARDBOOK_CUBLAS(status, "choice of an algorithm; ", text(dtype, args));
  if (count == 0 || found.state != CUBLAS_STATUS_SUCCESS) return false;
  plan->algorithm = found.algo;
  plan->workspace = found.workspaceSize;
  return true;
}

// The plan of a product with this epilogue. Where cuBLASLt has none with
// CUBLASLT_EPILOGUE_BIAS, it is a plan of the product alone.
Plan& plan_for(KernelContext& context, Products& all, DType dtype,
               const MatmulArgs& args, const Pointers& x,
               cublasLtEpilogue_t epilogue) {
  const bool tf32 = dtype == DType::kF32 && context.allow_tf32;
  const std::int64_t flags = args.trans_a | args.trans_b << 1 |
                             args.resume << 2 | tf32 << 3 |
                             context.deterministic << 4;
  const Key key = {static_cast<std::int64_t>(dtype),
                   flags,
                   args.batch,
                   args.m,
                   args.n,
                   args.k,
                   epilogue,
                   alignment_of(x.left),
                   alignment_of(x.right),
                   alignment_of(x.c),
                   x.bias == nullptr ? 0 : alignment_of(x.bias),
                   x.pre == nullptr ? 0 : alignment_of(x.pre)};
  const auto found = all.plans.find(key);
  if (found != all.plans.end()) return found->second;
  Plan plan;
  plan.is_chosen = choose(context, all, dtype, args, x, epilogue, &plan);
  if (!plan.is_chosen && epilogue == CUBLASLT_EPILOGUE_BIAS) {
    plan.is_chosen =
        choose(context, all, dtype, args, x, CUBLASLT_EPILOGUE_DEFAULT, &plan);
  }
  return all.plans.emplace(key, std::move(plan)).first->second;
}

void multiply(KernelContext& context, Products& all, Plan& plan, DType dtype,
              const MatmulArgs& args, const Pointers& x, bool accumulate) {
  set_pointers(plan.description.get(), plan.epilogue, x);
  const double alpha = 1.0, beta = accumulate ? 1.0 : 0.0;
  const float alpha32 = 1.0f, beta32 = accumulate ? 1.0f : 0.0f;
  const bool wide = dtype == DType::kF64;
  // cuBLASLt wants 256 bytes of alignment, scratch promises 64.
  constexpr std::size_t kAlignment = 256;
  const Scratch scratch(context,
                        plan.workspace == 0 ? 0 : plan.workspace + kAlignment);
  const auto address = reinterpret_cast<std::uintptr_t>(scratch.data());
  void* const workspace = reinterpret_cast<void*>((address + kAlignment - 1) /
                                                  kAlignment * kAlignment);
  SHARDBOOK_CUBLAS(
      cublasLtMatmul(all.handle.get(), plan.description.get(),
                     wide ? static_cast<const void*>(&alpha) : &alpha32, x.left,
                     plan.left.get(), x.right, plan.right.get(),
                     wide ? static_cast<const void*>(&beta) : &beta32, x.c,
                     plan.c.get(), x.c, plan.c.get(), &plan.algorithm,
                     workspace, plan.workspace, stream_of(context.stream)),
      text(dtype, args), ", epilogue ", static_cast<int>(plan.epilogue));
}

// C = 0.
void clear(KernelContext& context, DType dtype, const MatmulArgs& args,
           void* c) {
  const std::int64_t n = args.batch * args.m * args.n;
  SHARDBOOK_CUDA(
      cudaMemsetAsync(c, 0, static_cast<std::size_t>(n) * dtype_bytes(dtype),
                      stream_of(context.stream)),
      text(dtype, args));
}

// C += bias in every row. Only for products whose epilogue does not.
void add_bias(KernelContext& context, DType dtype, const MatmulArgs& args,
              const void* bias, void* c) {
  binary(context, BinaryOp::kAdd, dtype, {args.batch * args.m, args.n}, c,
         {args.n}, bias, c);
}

// C = the product, with its bias.
void multiply(KernelContext& context, DType dtype, const MatmulArgs& args,
              const void* a, const void* b, void* c, const void* bias) {
  Products& all = products(context);
  const Pointers x = {b, a, c, bias};
  Plan& plan = plan_for(
      context, all, dtype, args, x,
      bias == nullptr ? CUBLASLT_EPILOGUE_DEFAULT : CUBLASLT_EPILOGUE_BIAS);
  SB_CHECK(plan.is_chosen, "cuBLASLt: no algorithm within ",
           all.most_workspace >> 20, " MiB of workspace; ", text(dtype, args));
  bool accumulate = args.resume;
  if (bias != nullptr && plan.epilogue == CUBLASLT_EPILOGUE_DEFAULT) {
    if (!accumulate) clear(context, dtype, args, c);
    add_bias(context, dtype, args, bias, c);
    accumulate = true;
  }
  multiply(context, all, plan, dtype, args, x, accumulate);
}

}  // namespace

void matmul(KernelContext& context, DType dtype, const MatmulArgs& args,
            const void* a, const void* b, void* c, const void* bias) {
  check_args(args);
  data_type(dtype);  // throws for integers
  if (args.batch == 0 || args.m == 0 || args.n == 0) return;
  if (args.k == 0) {
    if (!args.resume) clear(context, dtype, args, c);
    if (bias != nullptr) add_bias(context, dtype, args, bias, c);
    return;
  }

  const MatmulArgs padded = bias == nullptr ? padded_sizes(dtype, args) : args;
  multiply_padded(context, args, padded, a, b, c,
                  [&](const MatmulArgs& sizes, const void* left,
                      const void* right, void* result) {
                    multiply(context, dtype, sizes, left, right, result, bias);
                  });
}

namespace {

// C = the product after its epilogue; false where cuBLASLt has none.
bool multiply_with_gelu(KernelContext& context, DType dtype,
                        const MatmulArgs& args, const Pointers& x,
                        cublasLtEpilogue_t epilogue) {
  if (!may_fuse_gelu(context, dtype, args)) return false;
  Products& all = products(context);
  Plan& plan = plan_for(context, all, dtype, args, x, epilogue);
  if (!plan.is_chosen) return false;
  multiply(context, all, plan, dtype, args, x, /*accumulate=*/false);
  return true;
}

}  // namespace

void matmul_gelu(KernelContext& context, DType dtype, const MatmulArgs& args,
                 const void* a, const void* b, const void* bias, void* pre,
                 void* y) {
  check_gelu_args(args);
  if (multiply_with_gelu(context, dtype, args, {b, a, y, bias, pre},
                         bias == nullptr ? CUBLASLT_EPILOGUE_GELU_AUX
                                         : CUBLASLT_EPILOGUE_GELU_AUX_BIAS)) {
    return;
  }
  cpu::matmul_gelu(context, dtype, args, a, b, bias, pre, y);
}

void matmul_gelu_backward(KernelContext& context, DType dtype,
                          const MatmulArgs& args, const void* a, const void* b,
                          const void* pre, void* dpre, void* dbias) {
  check_gelu_args(args);
  if (multiply_with_gelu(context, dtype, args, {b, a, dpre, dbias, pre},
                         dbias == nullptr ? CUBLASLT_EPILOGUE_DGELU
                                          : CUBLASLT_EPILOGUE_DGELU_BGRAD)) {
    return;
  }
  cpu::matmul_gelu_backward(context, dtype, args, a, b, pre, dpre, dbias);
}

SHARDBOOK_CUDA_KERNEL(matmul);
SHARDBOOK_CUDA_KERNEL(matmul_gelu);
SHARDBOOK_CUDA_KERNEL(matmul_gelu_backward);

}  // namespace shardbook::kernels::cuda
