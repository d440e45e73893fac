// Convolutions by cuDNN.
//
// cuDNN's fast kernels want channels innermost in weights too: [out, kh, kw,
// in]. Weights [out, in, kh, kw] are brought into that order in scratch, and
// their gradients back; both are small beside the images. f64, which is for
// proofs, has kernels for [n, channels, height, width] only: there the images
// are brought into that order, which the weights already have.
//
// cuDNN chooses an algorithm for each shape once. With context.deterministic
// the algorithm must give the same bits each time.

#include "core/kernels/conv.h"

#include <cudnn.h>

#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "core/check.h"
#include "core/kernels/cuda/device_state.h"
#include "core/kernels/cuda/owner.h"
#include "core/kernels/cuda/status_check.h"
#include "core/kernels/elementwise.h"
#include "core/kernels/layout.h"

namespace shardbook::kernels::cuda {

namespace {

#define SHARDBOOK_CUDNN(call, ...)                                    \
  do {                                                                \
    const cudnnStatus_t cudnn_status_ = (call);                       \
    SB_CHECK(cudnn_status_ == CUDNN_STATUS_SUCCESS, "cuDNN: ", #call, \
             " failed: ", cudnnGetErrorString(cudnn_status_), "; ",   \
             __VA_ARGS__);                                            \
  } while (false)

enum class Pass { kForward, kData, kWeight };

// A convolution as error messages name it.
std::string text(Pass pass, DType dtype, const ConvShape& s) {
  const char* const name = pass == Pass::kForward ? "conv2d"
                           : pass == Pass::kData  ? "conv2d_backward_data"
                                                  : "conv2d_backward_weight";
  const auto number = [](std::int64_t n) { return std::to_string(n); };
  return std::string(name) + " of " + dtype_name(dtype) + ", x [" +
         number(s.n) + ", " + number(s.h) + ", " + number(s.w) + ", " +
         number(s.in) + "], weight [" + number(s.out) + ", " + number(s.in) +
         ", " + number(s.kh) + ", " + number(s.kw) + "], stride " +
         number(s.stride) + ", padding " + number(s.padding);
}

cudnnDataType_t data_type(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return CUDNN_DATA_DOUBLE;
    case DType::kF32:
      return CUDNN_DATA_FLOAT;
    case DType::kBF16:
      return CUDNN_DATA_BFLOAT16;
    case DType::kF16:
      return CUDNN_DATA_HALF;
    default:
      SB_FAIL("conv2d: dtype ", dtype_name(dtype),
              "; give f64, f32, bf16 or f16");
  }
}

// Objects of cuDNN.
using Handle = Owner<cudnnHandle_t, cudnnDestroy>;
using Image = Owner<cudnnTensorDescriptor_t, cudnnDestroyTensorDescriptor>;
using Weight = Owner<cudnnFilterDescriptor_t, cudnnDestroyFilterDescriptor>;
using Description =
    Owner<cudnnConvolutionDescriptor_t, cudnnDestroyConvolutionDescriptor>;

// A convolution that cuDNN has chosen an algorithm for.
struct Plan {
  Image x, y;
  Weight weight;
  Description description;
  int algorithm = 0;  // in its pass's enumeration
  std::size_t workspace = 0;
};

// All that the choice of an algorithm depends on.
using Key = std::array<std::int64_t, 10>;

struct Convolutions {
  Handle handle;
  std::map<Key, Plan> plans;
};

Convolutions& convolutions(KernelContext& context) {
  CudaState& state = cuda_state(context);
  if (state.conv == nullptr) {
    refuse_capture(context,
                   "the first convolution of a rank starts cuDNN; run the work "
                   "once before");
    auto made = std::make_shared<Convolutions>();
    cudnnHandle_t handle = nullptr;
    SHARDBOOK_CUDNN(cudnnCreate(&handle), "the handle of a rank");
    made->handle.reset(handle);
    state.conv = made;
  }
  auto& all = *static_cast<Convolutions*>(state.conv.get());
  SHARDBOOK_CUDNN(cudnnSetStream(all.handle.get(), stream_of(context.stream)),
                  "the stream of a rank");
  return all;
}

// Algorithms that want more workspace are passed over, unless all do.
constexpr std::size_t kMostWorkspace = std::size_t{256} << 20;

// The fastest algorithm that `context` allows, from cuDNN's list.
template <typename Performance>
void take_first(const KernelContext& context, const Performance* list,
                int count, const std::string& what, Plan* plan) {
  cudnnMathType_t wanted = CUDNN_DEFAULT_MATH;
  SHARDBOOK_CUDNN(cudnnGetConvolutionMathType(plan->description.get(), &wanted),
                  what);
  const Performance* best = nullptr;
  for (int i = 0; i < count; ++i) {
    const Performance& one = list[i];
    // Any other math type would round f32 to TF32.
    if (one.status != CUDNN_STATUS_SUCCESS ||
        (wanted == CUDNN_FMA_MATH && one.mathType != CUDNN_FMA_MATH) ||
        (context.deterministic && one.determinism != CUDNN_DETERMINISTIC)) {
      continue;
    }
    if (best == nullptr || one.memory < best->memory) best = &one;
    if (best->memory <= kMostWorkspace) break;
  }
  SB_CHECK(best != nullptr, "cuDNN: no ",
           context.deterministic ? "deterministic " : "", "algorithm; ", what);
  plan->algorithm = static_cast<int>(best->algo);
  plan->workspace = best->memory;
  SHARDBOOK_CUDNN(
      cudnnSetConvolutionMathType(plan->description.get(), best->mathType),
      what);
}

void choose(const KernelContext& context, cudnnHandle_t handle, Pass pass,
            const std::string& what, Plan* plan) {
  constexpr int kMost = 2 * CUDNN_CONVOLUTION_FWD_ALGO_COUNT;  // math types
  int count = 0;
  switch (pass) {
    case Pass::kForward: {
      cudnnConvolutionFwdAlgoPerf_t list[kMost];
      SHARDBOOK_CUDNN(
          cudnnGetConvolutionForwardAlgorithm_v7(
              handle, plan->x.get(), plan->weight.get(),
              plan->description.get(), plan->y.get(), kMost, &count, list),
          what);
      return take_first(context, list, count, what, plan);
    }
    case Pass::kData: {
      cudnnConvolutionBwdDataAlgoPerf_t list[kMost];
      SHARDBOOK_CUDNN(
          cudnnGetConvolutionBackwardDataAlgorithm_v7(
              handle, plan->weight.get(), plan->y.get(),
              plan->description.get(), plan->x.get(), kMost, &count, list),
          what);
      return take_first(context, list, count, what, plan);
    }
    case Pass::kWeight: {
      cudnnConvolutionBwdFilterAlgoPerf_t list[kMost];
      SHARDBOOK_CUDNN(
          cudnnGetConvolutionBackwardFilterAlgorithm_v7(
              handle, plan->x.get(), plan->y.get(), plan->description.get(),
              plan->weight.get(), kMost, &count, list),
          what);
      return take_first(context, list, count, what, plan);
    }
  }
}

// cuDNN's names for the order of dims; sizes are always given as
// n, channels, height, width.
cudnnTensorFormat_t format_of(DType dtype) {
  return dtype == DType::kF64 ? CUDNN_TENSOR_NCHW : CUDNN_TENSOR_NHWC;
}

cudnnMathType_t math_type(const KernelContext& context, DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return CUDNN_DEFAULT_MATH;
    case DType::kF32:  // tensor cores would round to TF32
      return context.allow_tf32 ? CUDNN_TENSOR_OP_MATH : CUDNN_FMA_MATH;
    default:
      return CUDNN_TENSOR_OP_MATH;
  }
}

Plan& plan_for(KernelContext& context, Convolutions& all, Pass pass,
               DType dtype, const ConvShape& s) {
  const std::int64_t flags =
      static_cast<std::int64_t>(pass) | static_cast<std::int64_t>(dtype) << 4 |
      context.deterministic << 16 | context.allow_tf32 << 17;
  const Key key = {flags, s.n,  s.h,  s.w,      s.in,
                   s.out, s.kh, s.kw, s.stride, s.padding};
  const auto found = all.plans.find(key);
  if (found != all.plans.end()) return found->second;

  const std::string what = text(pass, dtype, s);
  refuse_capture(
      context,
      "cuDNN chooses an algorithm for a new shape; run the work once before");
  for (const std::int64_t size : {s.n, s.h, s.w, s.in, s.out, s.kh, s.kw}) {
    SB_CHECK(size <= std::numeric_limits<int>::max(), "cuDNN: a size of ", size,
             " is more than an int holds; ", what);
  }
  Plan plan;
  const cudnnDataType_t type = data_type(dtype);
  const auto image = [&](std::int64_t h, std::int64_t w, std::int64_t c) {
    cudnnTensorDescriptor_t made = nullptr;
    SHARDBOOK_CUDNN(cudnnCreateTensorDescriptor(&made), what);
    Image owner(made);
    SHARDBOOK_CUDNN(
        cudnnSetTensor4dDescriptor(made, format_of(dtype), type,
                                   static_cast<int>(s.n), static_cast<int>(c),
                                   static_cast<int>(h), static_cast<int>(w)),
        what);
    return owner;
  };
  plan.x = image(s.h, s.w, s.in);
  plan.y = image(s.out_h(), s.out_w(), s.out);
  cudnnFilterDescriptor_t weight = nullptr;
  SHARDBOOK_CUDNN(cudnnCreateFilterDescriptor(&weight), what);
  plan.weight.reset(weight);
  SHARDBOOK_CUDNN(cudnnSetFilter4dDescriptor(
                      weight, type, format_of(dtype), static_cast<int>(s.out),
                      static_cast<int>(s.in), static_cast<int>(s.kh),
                      static_cast<int>(s.kw)),
                  what);
  cudnnConvolutionDescriptor_t description = nullptr;
  SHARDBOOK_CUDNN(cudnnCreateConvolutionDescriptor(&description), what);
  plan.description.reset(description);
  const int padding = static_cast<int>(s.padding);
  const int stride = static_cast<int>(s.stride);
  SHARDBOOK_CUDNN(
      cudnnSetConvolution2dDescriptor(
          description, padding, padding, stride, stride, 1, 1,
          CUDNN_CROSS_CORRELATION,
          dtype == DType::kF64 ? CUDNN_DATA_DOUBLE : CUDNN_DATA_FLOAT),
      what);
  SHARDBOOK_CUDNN(
      cudnnSetConvolutionMathType(description, math_type(context, dtype)),
      what);
  choose(context, all.handle.get(), pass, what, &plan);
  return all.plans.emplace(key, std::move(plan)).first->second;
}

// An array in the order that cuDNN needs. It lies in scratch where that is not
// our order, and where an input's address is not a multiple of 16: cuDNN's
// kernels load 16 bytes at once, and parameters may lie anywhere in a flat
// buffer.
class Ordered {
 public:
  Ordered(KernelContext& context, DType dtype, Dims shape, Dims order,
          bool reorder, const void* plain)
      : context_(context),
        dtype_(dtype),
        shape_(std::move(shape)),
        order_(std::move(order)),
        plain_(plain),
        reorder_(reorder),
        scratch_(context, reorder || !is_aligned(plain) ? bytes() : 0) {}

  // The array as an input.
  const void* read() {
    if (scratch_.data() == nullptr) return plain_;
    if (!reorder_) {
      SHARDBOOK_CUDA(
          cudaMemcpyAsync(scratch_.data(), plain_, bytes(),
                          cudaMemcpyDeviceToDevice, stream_of(context_.stream)),
          bytes(), " bytes");
      return scratch_.data();
    }
    permute(context_, dtype_, shape_, order_, plain_, scratch_.data());
    return scratch_.data();
  }
  // Where cuDNN writes the output `plain`; call finish() after that.
  void* write(void* plain) {
    return scratch_.data() == nullptr ? plain : scratch_.data();
  }
  void finish(void* plain) {
    if (scratch_.data() == nullptr) return;
    Dims shape(shape_.size()), back(shape_.size());
    for (std::size_t d = 0; d < shape_.size(); ++d) {
      shape[d] = shape_[static_cast<std::size_t>(order_[d])];
      back[static_cast<std::size_t>(order_[d])] = static_cast<std::int64_t>(d);
    }
    permute(context_, dtype_, shape, back, scratch_.data(), plain);
  }

 private:
  static bool is_aligned(const void* data) {
    return reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
  }
  std::size_t bytes() const {
    std::size_t bytes = dtype_bytes(dtype_);
    for (const std::int64_t size : shape_) {
      bytes *= static_cast<std::size_t>(size);
    }
    return bytes;
  }

  KernelContext& context_;
  DType dtype_;
  Dims shape_, order_;
  const void* plain_;
  bool reorder_;
  Scratch scratch_;
};

struct Arrays {
  Arrays(KernelContext& context, DType dtype, const ConvShape& s,
         const void* from_x, const void* from_weight, const void* from_y)
      : x(context, dtype, {s.n, s.h, s.w, s.in}, {0, 3, 1, 2},
          dtype == DType::kF64, from_x),
        weight(context, dtype, {s.out, s.in, s.kh, s.kw}, {0, 2, 3, 1},
               dtype != DType::kF64 && s.kh * s.kw > 1, from_weight),
        y(context, dtype, {s.n, s.out_h(), s.out_w(), s.out}, {0, 3, 1, 2},
          dtype == DType::kF64, from_y) {}
  Ordered x, weight, y;
};

// Factors of the result and of the old values.
struct Factors {
  explicit Factors(DType dtype) : wide(dtype == DType::kF64) {}
  const void* one() const {
    return wide ? static_cast<const void*>(&one64) : &one32;
  }
  const void* zero() const {
    return wide ? static_cast<const void*>(&zero64) : &zero32;
  }
  bool wide;
  double one64 = 1.0, zero64 = 0.0;
  float one32 = 1.0f, zero32 = 0.0f;
};

bool is_empty(const ConvShape& s) { return s.rows() * s.out * s.depth() == 0; }

void set_zero(KernelContext& context, DType dtype, std::int64_t n, void* x) {
  if (n == 0) return;
  const std::size_t bytes = static_cast<std::size_t>(n) * dtype_bytes(dtype);
  SHARDBOOK_CUDA(cudaMemsetAsync(x, 0, bytes, stream_of(context.stream)), bytes,
                 " bytes");
}

}  // namespace

void conv2d(KernelContext& context, DType dtype, const ConvShape& s,
            const void* x, const void* weight, const void* bias, void* y,
            OrderedCopies*) {
  data_type(dtype);  // throws for integers
  if (is_empty(s)) {
    set_zero(context, dtype, s.rows() * s.out, y);
  } else {
    Convolutions& all = convolutions(context);
    Plan& plan = plan_for(context, all, Pass::kForward, dtype, s);
    Arrays arrays(context, dtype, s, x, weight, nullptr);
    const Scratch workspace(context, plan.workspace);
    const Factors factors(dtype);
    const void* const from = arrays.x.read();
    const void* const by = arrays.weight.read();
    SHARDBOOK_CUDNN(cudnnConvolutionForward(
                        all.handle.get(), factors.one(), plan.x.get(), from,
                        plan.weight.get(), by, plan.description.get(),
                        static_cast<cudnnConvolutionFwdAlgo_t>(plan.algorithm),
                        workspace.data(), plan.workspace, factors.zero(),
                        plan.y.get(), arrays.y.write(y)),
                    text(Pass::kForward, dtype, s));
    arrays.y.finish(y);
  }
  if (bias != nullptr && s.rows() * s.out != 0) {
    binary(context, BinaryOp::kAdd, dtype, {s.rows(), s.out}, y, {s.out}, bias,
           y);
  }
}

void conv2d_backward_data(KernelContext& context, DType dtype,
                          const ConvShape& s, const void* dy,
                          const void* weight, void* dx, OrderedCopies*) {
  data_type(dtype);
  if (is_empty(s)) return set_zero(context, dtype, s.n * s.h * s.w * s.in, dx);
  Convolutions& all = convolutions(context);
  Plan& plan = plan_for(context, all, Pass::kData, dtype, s);
  Arrays arrays(context, dtype, s, nullptr, weight, dy);
  const Scratch workspace(context, plan.workspace);
  const Factors factors(dtype);
  const void* const from = arrays.y.read();
  const void* const by = arrays.weight.read();
  SHARDBOOK_CUDNN(
      cudnnConvolutionBackwardData(
          all.handle.get(), factors.one(), plan.weight.get(), by, plan.y.get(),
          from, plan.description.get(),
          static_cast<cudnnConvolutionBwdDataAlgo_t>(plan.algorithm),
          workspace.data(), plan.workspace, factors.zero(), plan.x.get(),
          arrays.x.write(dx)),
      text(Pass::kData, dtype, s));
  arrays.x.finish(dx);
}

void conv2d_backward_weight(KernelContext& context, DType dtype,
                            const ConvShape& s, const void* x, const void* dy,
                            void* dweight, SharedKernelOrder*) {
  data_type(dtype);
  if (is_empty(s)) return set_zero(context, dtype, s.out * s.depth(), dweight);
  Convolutions& all = convolutions(context);
  Plan& plan = plan_for(context, all, Pass::kWeight, dtype, s);
  Arrays arrays(context, dtype, s, x, nullptr, dy);
  const Scratch workspace(context, plan.workspace);
  const Factors factors(dtype);
  const void* const from = arrays.x.read();
  const void* const by = arrays.y.read();
  SHARDBOOK_CUDNN(
      cudnnConvolutionBackwardFilter(
          all.handle.get(), factors.one(), plan.x.get(), from, plan.y.get(), by,
          plan.description.get(),
          static_cast<cudnnConvolutionBwdFilterAlgo_t>(plan.algorithm),
          workspace.data(), plan.workspace, factors.zero(), plan.weight.get(),
          arrays.weight.write(dweight)),
      text(Pass::kWeight, dtype, s));
  arrays.weight.finish(dweight);
}

SHARDBOOK_CUDA_KERNEL(conv2d);
SHARDBOOK_CUDA_KERNEL(conv2d_backward_data);
SHARDBOOK_CUDA_KERNEL(conv2d_backward_weight);

}  // namespace shardbook::kernels::cuda
