// What kernels on CUDA refuse, and what they find on the device.

#include <functional>

#include "core/kernels/attention.h"
#include "core/kernels/combine.h"
#include "core/kernels/elementwise.h"
#include "core/kernels/embedding.h"
#include "core/kernels/layout.h"
#include "core/kernels/norm.h"
#include "core/kernels/optimizer.h"
#include "core/kernels/random.h"
#include "core/kernels/reduce.h"
#include "core/kernels/vocabulary.h"
#include "tests/cuda/parity.h"
#include "tests/support/errors.h"

namespace shardbook::parity {
namespace {

constexpr DType kF64 = DType::kF64, kI64 = DType::kI64;

TEST(ParityErrors, ArgumentsAreRefusedAsOnTheCpu) {
  CudaContext cuda;
  KernelContext& context = cuda.kernels();
  double x[64] = {};
  kernels::AttentionArgs view;
  view.batch = 1, view.heads = 4, view.kv_heads = 2;
  view.q_rows = view.k_rows = view.head_dim = 2;
  view.dropout = 0.5;
  view.dropout_view = {{1, 4, 2, 2}, {1, 4, 2, 2}, {0, 1, 0, 0}, {}};
  kernels::ParameterSlice slice, integers;
  slice.n = integers.n = 1;
  slice.dtype = slice.grad_dtype = integers.dtype = kF64;
  integers.grad_dtype = kI64;
  kernels::SgdOptions momentum;
  momentum.momentum = 0.9;
  const std::vector<std::function<void()>> calls = {
      [&] { kernels::attention(context, kF64, view, x, x, x, x, x); },
      [&] {
        kernels::combine(context, kF64, kernels::ReduceKind::kSum, 1, {}, {});
      },
      [&] {
        kernels::binary(context, kernels::BinaryOp::kAdd, kF64, {3}, x, {2}, x,
                        x);
      },
      [&] { kernels::unary(context, kernels::UnaryOp::kExp, kI64, 1, x, x); },
      [&] {
        kernels::gather_rows(context, kF64, {4, 1}, x, kF64, x, 1, x);
      },
      [&] {
        kernels::permute(context, kF64, {2, 2}, {0, 0}, x, x);
      },
      [&] {
        kernels::copy_strided(context, kF64, {2}, x, {1, 1}, x, {1});
      },
      [&] { kernels::layer_norm(context, kF64, 1, 0, 0, x, x, x, x, x, x); },
      [&] { kernels::sgd_step(context, slice, momentum, nullptr, true); },
      [&] { kernels::adam_step(context, slice, {}, 0, nullptr, nullptr); },
      [&] { kernels::adam_step(context, integers, {}, 1, nullptr, nullptr); },
      [&] {
        kernels::fill_uniform(context, kF64, {{4}, {4}, {1}, {}}, {}, 0, 1, x);
      },
      [&] {
        kernels::dropout(context, kF64, kernels::whole_view({8}), {}, 1.0, x,
                         x);
      },
      [&] { kernels::sum_to_shape(context, kF64, {4}, x, {2}, x); },
      [&] { kernels::sum_rows(context, kI64, 1, 1, x, x); }};
  for (std::size_t i = 0; i < calls.size(); ++i) {
    EXPECT_THROW(calls[i](), Error) << "call " << i;
  }
}

// --- What a kernel finds: the next kernel with a result brings it to light.

TEST(ParityErrors, ADivisionByZeroIsReportedOnce) {
  for (const DType dtype : {kI64, DType::kI32}) {
    CudaContext cuda;
    KernelContext& context = cuda.kernels();
    const DeviceArray a(cuda, Array(dtype, {1, 1, 1}));
    const DeviceArray b(cuda, Array(dtype, {1, 0, 1}));
    kernels::binary(context, kernels::BinaryOp::kDiv, dtype, {3}, a.data(), {3},
                    b.data(), a.data());
    const auto difference = [&] {
      return kernels::max_abs_difference(context, dtype, 3, b.data(), b.data());
    };
    EXPECT_THROW(difference(), Error);
    EXPECT_EQ(difference(), 0);
  }
}

TEST(ParityErrors, ABadIndexIsNamed) {
  for (const int bad : {4, -1, 9}) {
    for (const bool scatters : {false, true}) {
      for (const bool skip_foreign : {false, true}) {
        CudaContext cuda;
        KernelContext& context = cuda.kernels();
        const kernels::TableShape shape{4, 1, 0, skip_foreign};
        const DeviceArray table(cuda, Array(kF64, {0, 0, 0, 0}));
        const DeviceArray rows(cuda, Array(kF64, {0, 0}));
        const DeviceArray index(cuda,
                                Array(kI64, {1, static_cast<double>(bad)}));
        if (scatters) {
          kernels::scatter_add_rows(context, kF64, shape, table.data(), kI64,
                                    index.data(), 2, rows.data());
        } else {
          kernels::gather_rows(context, kF64, shape, table.data(), kI64,
                               index.data(), 2, rows.data());
        }
        const std::string text = error_of(
            [&] { kernels::sum_squares(context, kF64, 2, rows.data()); });
        if (skip_foreign && bad >= 0) {
          EXPECT_EQ(text, "");
        } else {
          expect_text(text, {"index " + std::to_string(bad)});
        }
      }
    }
  }
}

TEST(ParityErrors, ATargetOutsideTheClassesIsNamed) {
  for (const int bad : {2, -1, -101}) {
    CudaContext cuda;
    KernelContext& context = cuda.kernels();
    const DeviceArray logits(cuda, Array(kF64, {0, 0, 0, 0}));
    const DeviceArray loss(cuda, Array(kF64, {0, 0}));
    const DeviceArray targets(cuda, Array(kI64, {0, static_cast<double>(bad)}));
    kernels::cross_entropy(context, kF64, 2, 2, logits.data(), targets.data(),
                           loss.data(), nullptr);
    expect_error([&] { kernels::sum_squares(context, kF64, 2, loss.data()); },
                 {"target " + std::to_string(bad)});
  }
}

}  // namespace
}  // namespace shardbook::parity
