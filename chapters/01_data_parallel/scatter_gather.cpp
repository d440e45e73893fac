// Scatter and gather: each is the other's backward.

#include <algorithm>
#include <utility>

#include "chapters/01_data_parallel/data_parallel.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"
#include "core/ops.h"
#include "core/tensor_storage.h"

namespace shardbook::data_parallel {
namespace {

/// The distribution of a tensor's rows over devices.
struct Pieces {
  std::vector<RowRange> ranges;
  std::vector<Device> devices;  // of each piece
  Shape shape;                  // of the whole
  Device whole_device;
  DType dtype = DType::kF32;

  Shape shape_of(std::size_t i) const {
    Shape piece = shape;
    piece[0] = ranges[i].second - ranges[i].first;
    return piece;
  }
};

/// The copies between the whole and its pieces, for the ledger: the device with
/// the whole is the root, and joins the group even without a piece.
DeviceCopy copy_of(CommOp op, const Pieces& pieces, const std::string& label) {
  DeviceCopy copy;
  copy.op = op;
  copy.devices = pieces.devices;
  copy.dtype = pieces.dtype;
  copy.numel = shape_numel(pieces.shape);
  copy.label = label;
  auto root =
      std::find(copy.devices.begin(), copy.devices.end(), pieces.whole_device);
  if (root == copy.devices.end()) {
    copy.devices.push_back(pieces.whole_device);
    root = std::prev(copy.devices.end());
  }
  copy.root = static_cast<int>(root - copy.devices.begin());

  copy.sent.assign(copy.devices.size(), 0);
  const auto r = static_cast<std::size_t>(copy.root);
  for (std::size_t i = 0; i < pieces.devices.size(); ++i) {
    if (i == r) continue;
    copy.sent[op == CommOp::kScatter ? r : i] +=
        shape_numel(pieces.shape_of(i));
  }
  return copy;
}

void run(const SharedLedger& ledger, const DeviceCopy& copy,
         const std::function<void()>& make_copies) {
  if (ledger == nullptr) return make_copies();
  ledger->run(copy, make_copies);
}

/// The pieces, each on its device; a piece already there is a view.
Tensors cut(const Tensor& whole, const Pieces& pieces, const std::string& label,
            const SharedLedger& ledger) {
  NoGrad no_grad;
  MemoryScope kind(memory_kind_of(whole));
  Tensors parts;
  run(ledger, copy_of(CommOp::kScatter, pieces, label), [&] {
    for (std::size_t i = 0; i < pieces.ranges.size(); ++i) {
      const auto [begin, end] = pieces.ranges[i];
      parts.push_back(
          to_device(whole.rows_view(begin, end), pieces.devices[i]));
    }
  });
  return parts;
}

/// The whole, from its pieces.
Tensor join(const Tensors& parts, const Pieces& pieces,
            const std::string& label, const SharedLedger& ledger) {
  NoGrad no_grad;
  Tensor whole;
  run(ledger, copy_of(CommOp::kGather, pieces, label), [&] {
    whole = Tensor::empty(pieces.shape, {pieces.dtype, pieces.whole_device});
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const auto [begin, end] = pieces.ranges[i];
      whole.rows_view(begin, end).copy_from(parts[i]);
    }
  });
  return whole;
}

/// A piece without a gradient counts as zero.
Tensors defined_grads(Tensors grads, const Pieces& pieces) {
  for (std::size_t i = 0; i < grads.size(); ++i) {
    if (grads[i].defined()) continue;
    grads[i] =
        Tensor::zeros(pieces.shape_of(i), {pieces.dtype, pieces.devices[i]});
  }
  return grads;
}

}  // namespace

std::vector<RowRange> ceil_chunks(std::int64_t n, std::int64_t parts) {
  SB_CHECK(n >= 0 && parts >= 1, "ceil_chunks: ", n, " rows over ", parts,
           " parts");
  if (n == 0) return {{0, 0}};
  const std::int64_t rows = (n + parts - 1) / parts;
  std::vector<RowRange> ranges;
  for (std::int64_t begin = 0; begin < n; begin += rows) {
    ranges.emplace_back(begin, std::min(n, begin + rows));
  }
  return ranges;
}

Tensors scatter(const Tensor& x, const std::vector<Device>& devices,
                const SharedLedger& ledger) {
  Pieces pieces;
  pieces.ranges =
      ceil_chunks(x.size(0), static_cast<std::int64_t>(devices.size()));
  pieces.devices.assign(
      devices.begin(),
      devices.begin() + static_cast<std::ptrdiff_t>(pieces.ranges.size()));
  pieces.shape = x.shape();
  pieces.whole_device = x.device();
  pieces.dtype = x.dtype();
  const Tensors parts = cut(x, pieces, "inputs", ledger);
  autograd::record("scatter", {x}, parts, [pieces, ledger](const Tensors& g) {
    return Tensors{
        join(defined_grads(g, pieces), pieces, "input gradients", ledger)};
  });
  return parts;
}

Tensor gather(Tensors parts, const Device& device, const SharedLedger& ledger) {
  // A scalar per device becomes a vector.
  for (Tensor& part : parts) {
    if (part.ndim() == 0) part = reshape(part, {1});
  }
  if (parts.size() == 1 && parts[0].device() == device) return parts[0];

  Pieces pieces;
  pieces.shape = parts[0].shape();
  pieces.shape[0] = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    Shape expected = parts[i].shape();
    const std::int64_t rows = std::exchange(expected[0], pieces.shape[0]);
    SB_CHECK(expected == pieces.shape && parts[i].dtype() == parts[0].dtype(),
             "gather: outputs ", dtype_name(parts[0].dtype()),
             shape_text(parts[0].shape()), " and ",
             dtype_name(parts[i].dtype()), shape_text(parts[i].shape()),
             " (replica ", i, ") cannot be joined");
    pieces.ranges.emplace_back(pieces.shape[0], pieces.shape[0] + rows);
    pieces.devices.push_back(parts[i].device());
    pieces.shape[0] += rows;
  }
  pieces.whole_device = device;
  pieces.dtype = parts[0].dtype();
  const Tensor whole = join(parts, pieces, "outputs", ledger);
  autograd::record("gather", parts, {whole},
                   [pieces, ledger](const Tensors& grads) {
                     return cut(grads[0], pieces, "output gradients", ledger);
                   });
  return whole;
}

}  // namespace shardbook::data_parallel
