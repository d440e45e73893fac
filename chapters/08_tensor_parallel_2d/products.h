#pragma once

// SUMMA: products of matrices that lie in blocks on a square of ranks.
//
//   C = A B     step t: A's column t of blocks goes along the ROWs, B's row t of
//               blocks along the COLs, and every rank adds one product:
//
//                 A(0,t) ->  C(0,0)  C(0,1)       B(t,0)  B(t,1)
//                 A(1,t) ->  C(1,0)  C(1,1)          |       |
//                                                    v       v
//   C = A B^T   B's row t goes along the COLs; the products are partial sums of
//               C's column t, which meet along the ROWs
//   C = A^T B   A's column t goes along the ROWs; the partial sums of C's row t
//               meet along the COLs
//
// The three are closed under differentiation: the gradients of each are two of
// the others. The broadcasts of step t + 1 are under way while step t multiplies,
// and so is the reduction of step t - 1. Roots are ranks of the ROW or COL group,
// never of the world. With q = 1 each is one product and nothing is sent.
//
// van de Geijn and Watts 1997, "SUMMA: Scalable Universal Matrix Multiplication
// Algorithm"; Xu et al. 2021, "An Efficient 2D Method for Training Super-Large
// Deep Learning Models" (Optimus), section 3.

#include "chapters/08_tensor_parallel_2d/grid.h"
#include "core/tensor_storage.h"

namespace shardbook::summa {

/// Blocks a [m, k] and b [k, n] -> block [m, n] of A B, with `bias` [n] added when
/// given. q broadcasts along ROW of m k elements, and q along COL of k n. In
/// deterministic mode the bits equal one device's: each element is one chain of
/// additions in increasing k.
Tensor multiply_ab(const Tensor& a, const Tensor& b, const Grid& grid,
                   const Tensor& bias = Tensor());
/// Blocks a [m, n] and b [k, n] -> block [m, k] of A B^T: q broadcasts along COL of
/// k n elements, q reductions along ROW of m k.
Tensor multiply_abt(const Tensor& a, const Tensor& b, const Grid& grid);
/// Blocks a [m, k] and b [m, n] -> block [k, n] of A^T B: q broadcasts along ROW of
/// m k elements, q reductions along COL of k n.
Tensor multiply_atb(const Tensor& a, const Tensor& b, const Grid& grid);

/// The three with gradients, for matrices [rows, columns].
Tensor product_ab(const Tensor& a, const Tensor& b, const Grid& grid);
Tensor product_abt(const Tensor& a, const Tensor& b, const Grid& grid);
Tensor product_atb(const Tensor& a, const Tensor& b, const Grid& grid);

/// Books the result of a backward for `input`: as a gradient if it becomes the
/// parameter's own, otherwise as an activation.
class GradientScope : public MemoryScope {
 public:
  explicit GradientScope(const Tensor& input)
      : MemoryScope(becomes_gradient(input) ? MemoryKind::kGradient
                                            : MemoryKind::kActivation) {}

 private:
  static bool becomes_gradient(const Tensor& input) {
    if (stands_for_parameter(input)) return true;
    return input.is_leaf() && memory_kind_of(input) == MemoryKind::kParameter &&
           !input.grad().defined();
  }
};

}  // namespace shardbook::summa
