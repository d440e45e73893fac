#pragma once

// Tesseract: d squares of q x q ranks, one above the other.
//
//   depth k = 1      (0,0,1)  (0,1,1)
//                    (1,0,1)  (1,1,1)        rank (i, j, k) = j + q (i + q k)
//   depth k = 0    (0,0,0)  (0,1,0)
//                  (1,0,0)  (1,1,0)
//
// Each square multiplies as the 2D chapter does, with its own d-th of the rows
// and weights that all squares share. Its weight gradients cover its own rows
// only, so each layer adds them over DEP, the ranks of one (i, j). The layers
// are the 2D chapter's; only the grid changes: it has a depth.
//
// Wang et al. 2021, "Tesseract: Parallelize the Tensor Parallelism Efficiently",
// section 3.

#include "chapters/08_tensor_parallel_2d/summa_strategy.h"

namespace shardbook::tesseract {

/// Axes "dep", "col", "row": rank = j + q (i + q k).
Topology squares(int q, int depth);

}  // namespace shardbook::tesseract
