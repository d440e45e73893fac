#pragma once

// 3x3 convolutions with fewer multiplications: F(2x2, 3x3) of Winograd's
// minimal filtering (Lavin and Gray 2016). Read by core/kernels/*.cpp only.
//
// Four outputs of a 3x3 window need a 4x4 patch of the image and, directly, 36
// multiplications. Winograd's algorithm needs 16: it transforms patch and
// window to 4x4 points each, multiplies point by point, and transforms back.
// The transforms are additions and halves, and their cost is shared: a patch is
// transformed once for all outputs, a window once for all patches. With many
// channels each of the 16 points is a matrix product.
//
//   V = B' d B      patch d    B' = | 1  0 -1  0 |   G = | 1   0   0  |
//   U = G g G'      window g        | 0  1  1  0 |       | 1/2 1/2 1/2|
//   M = sum over channels of U V    | 0 -1  1  0 |       | 1/2-1/2 1/2|
//   Y = A' M A      outputs Y       | 0  1  0 -1 |       | 0   0   1  |
//                              A' = | 1  1  1  0 |
//                                   | 0  1 -1 -1 |
//
// The gradient of the image is also such a convolution, of the outputs'
// gradient with windows turned by half a turn. The gradient of the windows is
// the transpose of the whole: dG = G' (sum over patches of V' A dY A') G.
//
// Results differ from a direct convolution in rounding only. Their bits depend
// neither on the threads nor, for an image's outputs, on other images.

#include <cstdint>

#include "core/kernels/conv.h"
#include "core/kernels/kernel_order.h"

namespace shardbook::kernels::cpu {

/// True for the f32 convolutions below: windows of 3x3, stride 1, padding of 1,
/// channels in whole blocks, and enough images to pay for the transforms.
bool is_winograd(const ConvShape& shape);

/// y = conv(x, weight) + bias; bias may be null. `copies` as conv2d's.
void winograd_forward(KernelContext& context, const ConvShape& shape,
                      const float* x, const float* weight, const float* bias,
                      float* y, OrderedCopies* copies);
/// dx from dy.
void winograd_backward_data(KernelContext& context, const ConvShape& shape,
                            const float* dy, const float* weight, float* dx,
                            OrderedCopies* copies);
/// dweight from x and dy, row-major; patches are added in order.
void winograd_backward_weight(KernelContext& context, const ConvShape& shape,
                              const float* x, const float* dy, float* dweight);

}  // namespace shardbook::kernels::cpu
