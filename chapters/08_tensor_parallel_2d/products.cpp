#include "chapters/08_tensor_parallel_2d/products.h"

#include <array>

#include "core/autograd.h"
#include "core/check.h"
#include "core/inplace.h"

namespace shardbook::summa {
namespace {

/// Blocks that travel between the ranks of a group, one per step, each while
/// another one is in use. Rank t's own block is `own`; the others use two buffers
/// in turn.
class Travelling {
 public:
  Travelling(const Tensor& own, ProcessGroup& group, const char* label)
      : own_(own), group_(group), label_(label) {}

  /// Begins the broadcast of rank t's block.
  void start(int t) {
    if (t >= group_.size()) return;
    works_[slot(t)] = group_.broadcast(array_of(t), t, label_);
  }
  /// Rank t's block, once it is here.
  const Tensor& wait(int t) {
    works_[slot(t)].wait();
    return arrays_[slot(t)];
  }

  /// The array for this rank's term of the sum that goes to rank t.
  const Tensor& part(int t) {
    // The buffer was last used two steps ago, or before
    works_[slot(t)].wait();
    return array_of(t);
  }
  /// Begins the sum of step t; it travels while the next part is computed.
  void reduce(int t) {
    works_[slot(t)] =
        group_.reduce(arrays_[slot(t)], t, ReduceOp::kSum, label_);
  }
  /// Waits for all sums; returns this rank's.
  Tensor finish() {
    for (Work& work : works_) work.wait();
    return own_;
  }

 private:
  static std::size_t slot(int t) { return static_cast<std::size_t>(t % 2); }

  const Tensor& array_of(int t) {
    if (t == group_.rank()) return arrays_[slot(t)] = own_;
    Tensor& buffer = buffers_[slot(num_foreign_++)];
    if (!buffer.defined()) {
      const MemoryScope kind(MemoryKind::kCommunication);
      buffer = own_.empty_like();
    }
    return arrays_[slot(t)] = buffer;
  }

  Tensor own_;
  ProcessGroup& group_;
  const char* label_;
  std::array<Tensor, 2> buffers_, arrays_;
  std::array<Work, 2> works_;
  int num_foreign_ = 0;
};

void check_blocks(const char* product, const Tensor& a, std::int64_t a_dim,
                  const Tensor& b, std::int64_t b_dim) {
  SB_CHECK(a.ndim() == 2 && b.ndim() == 2 && a.size(a_dim) == b.size(b_dim),
           "summa: blocks ", shape_text(a.shape()), " and ",
           shape_text(b.shape()), " do not fit for ", product);
}

}  // namespace

Tensor multiply_ab(const Tensor& a, const Tensor& b, const Grid& grid,
                   const Tensor& bias) {
  check_blocks("A B", a, 1, b, 0);
  const int q = grid.q();
  Tensor c = Tensor::empty({a.size(0), b.size(1)}, a.options());
  Travelling columns_of_a(a, *grid.row, "A"), rows_of_b(b, *grid.col, "B");
  const auto start = [&](int t) {
    columns_of_a.start(t);
    rows_of_b.start(t);
  };
  // The blocks of step t + 1 arrive while those of step t are multiplied
  start(0);
  for (int t = 0; t < q; ++t) {
    start(t + 1);
    const Tensor& a_t = columns_of_a.wait(t);
    const Tensor& b_t = rows_of_b.wait(t);
    matmul_into(c, a_t, b_t, false, false, /*from_zero=*/t == 0,
                t == q - 1 ? bias : Tensor());
  }
  return c;
}

Tensor multiply_abt(const Tensor& a, const Tensor& b, const Grid& grid) {
  check_blocks("A B^T", a, 1, b, 1);
  Travelling rows_of_b(b, *grid.col, "B");
  Travelling columns_of_c(Tensor::empty({a.size(0), b.size(0)}, a.options()),
                          *grid.row, "C");
  // The sum of step t travels while the product of step t + 1 is computed
  rows_of_b.start(0);
  for (int t = 0; t < grid.q(); ++t) {
    rows_of_b.start(t + 1);
    const Tensor& part = columns_of_c.part(t);
    matmul_into(part, a, rows_of_b.wait(t), false, true, /*from_zero=*/true);
    columns_of_c.reduce(t);
  }
  return columns_of_c.finish();
}

Tensor multiply_atb(const Tensor& a, const Tensor& b, const Grid& grid) {
  check_blocks("A^T B", a, 0, b, 0);
  Travelling columns_of_a(a, *grid.row, "A");
  Travelling rows_of_c(Tensor::empty({a.size(1), b.size(1)}, a.options()),
                       *grid.col, "C");
  columns_of_a.start(0);
  for (int t = 0; t < grid.q(); ++t) {
    columns_of_a.start(t + 1);
    const Tensor& part = rows_of_c.part(t);
    matmul_into(part, columns_of_a.wait(t), b, true, false, /*from_zero=*/true);
    rows_of_c.reduce(t);
  }
  return rows_of_c.finish();
}

namespace {

using Multiply = Tensor (*)(const Tensor& a, const Tensor& b, const Grid& grid);

Tensor forward_ab(const Tensor& a, const Tensor& b, const Grid& grid) {
  return multiply_ab(a, b, grid);
}

/// A product whose gradients are `of_a` and `of_b`.
Tensor with_gradients(const char* name, const Tensor& a, const Tensor& b,
                      const Grid& grid, Multiply multiply,
                      const std::function<Tensor(const Tensor& dc)>& of_a,
                      const std::function<Tensor(const Tensor& dc)>& of_b) {
  return autograd::custom_function(
      name, {a, b},
      [&](const Tensors& in) { return Tensors{multiply(in[0], in[1], grid)}; },
      [=](const Tensors& grads) {
        Tensors result(2);
        if (a.requires_grad()) {
          const GradientScope kind(a);
          result[0] = of_a(grads[0]);
        }
        if (b.requires_grad()) {
          const GradientScope kind(b);
          result[1] = of_b(grads[0]);
        }
        return result;
      })[0];
}

}  // namespace

Tensor product_ab(const Tensor& a, const Tensor& b, const Grid& grid) {
  return with_gradients(
      "summa_ab", a, b, grid, forward_ab,
      [=](const Tensor& dc) { return multiply_abt(dc, b, grid); },
      [=](const Tensor& dc) { return multiply_atb(a, dc, grid); });
}

Tensor product_abt(const Tensor& a, const Tensor& b, const Grid& grid) {
  return with_gradients(
      "summa_abt", a, b, grid, multiply_abt,
      [=](const Tensor& dc) { return multiply_ab(dc, b, grid); },
      [=](const Tensor& dc) { return multiply_atb(dc, a, grid); });
}

Tensor product_atb(const Tensor& a, const Tensor& b, const Grid& grid) {
  return with_gradients(
      "summa_atb", a, b, grid, multiply_atb,
      [=](const Tensor& dc) { return multiply_abt(b, dc, grid); },
      [=](const Tensor& dc) { return multiply_ab(a, dc, grid); });
}

}  // namespace shardbook::summa
