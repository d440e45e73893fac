// Scatter and gather: each is the other's backward.

#include <algorithm>

#include "chapters/01_data_parallel/data_parallel.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"
#include "core/ops.h"
#include "core/tensor_storage.h"

namespace shardbook::data_parallel {
namespace {

/// How one tensor lies in pieces on devices.
struct Pieces {
  std::vector<RowRange> ranges;  // along dim
  std::vector<Device> devices;   // of each piece
  Shape shape;                   // of the whole
  std::int64_t dim = 0;
  Device whole_device;
  DType dtype = DType::kF32;

  std::int64_t numel(std::size_t i) const {
    const std::int64_t size = shape[static_cast<std::size_t>(dim)];
    const std::int64_t rows = ranges[i].second - ranges[i].first;
    return size == 0 ? 0 : shape_numel(shape) / size * rows;
  }
};

/// The copies between the whole and its pieces, for the ledger: the device of
/// the whole is the root, and joins the group where it has no piece.
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
    copy.sent[op == CommOp::kScatter ? r : i] += pieces.numel(i);
  }
  return copy;
}

void run(const SharedLedger& ledger, const DeviceCopy& copy,
         const std::function<void()>& make_copies) {
  if (ledger == nullptr) return make_copies();
  ledger->run(copy, make_copies);
}

/// The pieces, each on its device; the one that is there already is a view
/// where dim 0 is cut.
Tensors cut(const Tensor& whole, const Pieces& pieces, const std::string& label,
            const SharedLedger& ledger) {
  NoGrad no_grad;
  MemoryScope kind(memory_kind_of(whole));
  Tensors parts;
  run(ledger, copy_of(CommOp::kScatter, pieces, label), [&] {
    for (std::size_t i = 0; i < pieces.ranges.size(); ++i) {
      const auto [begin, end] = pieces.ranges[i];
      const Tensor part = slice(whole, pieces.dim, begin, end);
      parts.push_back(to_device(part, pieces.devices[i]));
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
    if (pieces.dim != 0) {
      Tensors moved;
      for (const Tensor& part : parts) {
        moved.push_back(to_device(part, pieces.whole_device));
      }
      whole = concat(moved, pieces.dim);
      return;
    }
    whole = Tensor::empty(pieces.shape, {pieces.dtype, pieces.whole_device});
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const auto [begin, end] = pieces.ranges[i];
      whole.rows_view(begin, end).copy_from(parts[i]);
    }
  });
  return whole;
}

/// A piece without a gradient has the gradient zero.
Tensors defined_grads(const Tensors& grads, const Pieces& pieces) {
  Tensors parts = grads;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].defined()) continue;
    Shape shape = pieces.shape;
    shape[static_cast<std::size_t>(pieces.dim)] =
        pieces.ranges[i].second - pieces.ranges[i].first;
    parts[i] = Tensor::zeros(shape, {pieces.dtype, pieces.devices[i]});
  }
  return parts;
}

Tensors scatter_tensor(const Tensor& x, const std::vector<Device>& devices,
                       std::int64_t dim, const SharedLedger& ledger) {
  Pieces pieces;
  pieces.dim = dim < 0 ? dim + x.ndim() : dim;
  pieces.ranges =
      ceil_chunks(x.size(dim), static_cast<std::int64_t>(devices.size()));
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

Tensor gather_tensor(Tensors parts, const Device& output_device,
                     std::int64_t dim, const SharedLedger& ledger) {
  // A scalar per device becomes a vector.
  for (Tensor& part : parts) {
    if (part.ndim() == 0) part = reshape(part, {1});
  }
  if (parts.size() == 1 && parts[0].device() == output_device) return parts[0];

  Pieces pieces;
  pieces.shape = parts[0].shape();
  const std::int64_t n = parts[0].ndim();
  SB_CHECK(dim >= -n && dim < n, "gather: dim ", dim, " of outputs of shape ",
           shape_text(pieces.shape));
  pieces.dim = dim < 0 ? dim + n : dim;
  const auto d = static_cast<std::size_t>(pieces.dim);
  pieces.shape[d] = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    Shape expected = parts[i].shape();
    SB_CHECK(expected.size() == pieces.shape.size() &&
                 parts[i].dtype() == parts[0].dtype(),
             "gather: outputs ", dtype_name(parts[0].dtype()),
             shape_text(parts[0].shape()), " and ",
             dtype_name(parts[i].dtype()), shape_text(parts[i].shape()),
             " (replica ", i, ") cannot be joined along dim ", dim);
    const std::int64_t rows = expected[d];
    expected[d] = pieces.shape[d];
    SB_CHECK(expected == pieces.shape, "gather: outputs of shapes ",
             shape_text(parts[0].shape()), " and ",
             shape_text(parts[i].shape()), " (replica ", i,
             ") cannot be joined along dim ", dim);
    pieces.ranges.emplace_back(pieces.shape[d], pieces.shape[d] + rows);
    pieces.devices.push_back(parts[i].device());
    pieces.shape[d] += rows;
  }
  pieces.whole_device = output_device;
  pieces.dtype = parts[0].dtype();
  const Tensor whole = join(parts, pieces, "outputs", ledger);
  autograd::record("gather", parts, {whole},
                   [pieces, ledger](const Tensors& grads) {
                     return cut(grads[0], pieces, "output gradients", ledger);
                   });
  return whole;
}

/// Number of trees that `inputs` falls into; 0 when it has no tensors.
std::size_t num_chunks(const Value& inputs, std::size_t num_devices,
                       std::int64_t dim) {
  std::size_t count = 0;
  for (const Tensor& x : tensors_of(inputs)) {
    SB_CHECK(dim >= -x.ndim() && dim < x.ndim(), "scatter: a tensor of shape ",
             shape_text(x.shape()), " has no dim ", dim,
             "; pass what all replicas share as an object");
    const std::size_t chunks =
        ceil_chunks(x.size(dim), static_cast<std::int64_t>(num_devices)).size();
    SB_CHECK(count == 0 || chunks == count, "scatter: the tensors fall into ",
             count, " and ", chunks, " chunks along dim ", dim,
             "; all tensors of a call have the "
             "rows of one batch");
    count = chunks;
  }
  return count;
}

std::vector<Value> scatter_tree(const Value& value,
                                const std::vector<Device>& devices,
                                std::size_t count, std::int64_t dim,
                                const SharedLedger& ledger) {
  if (value.is_tensor()) {
    const Tensors parts = scatter_tensor(value.tensor(), devices, dim, ledger);
    return {parts.begin(), parts.end()};
  }
  if (value.is_list()) {
    std::vector<Value::List> lists(count);
    for (const Value& entry : value.list()) {
      const auto parts = scatter_tree(entry, devices, count, dim, ledger);
      for (std::size_t i = 0; i < count; ++i) lists[i].push_back(parts[i]);
    }
    return {lists.begin(), lists.end()};
  }
  if (value.is_dictionary()) {
    std::vector<Value::Dictionary> dictionaries(count);
    for (const auto& [key, entry] : value.dictionary()) {
      const auto parts = scatter_tree(entry, devices, count, dim, ledger);
      for (std::size_t i = 0; i < count; ++i) dictionaries[i][key] = parts[i];
    }
    return {dictionaries.begin(), dictionaries.end()};
  }
  return std::vector<Value>(count, value);
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

std::vector<Value> scatter(const Value& inputs,
                           const std::vector<Device>& devices, std::int64_t dim,
                           const SharedLedger& ledger) {
  SB_CHECK(!devices.empty(), "scatter: no devices were given");
  std::size_t count = num_chunks(inputs, devices.size(), dim);
  if (count == 0) count = devices.size();
  return scatter_tree(inputs, devices, count, dim, ledger);
}

Value gather(const std::vector<Value>& outputs, const Device& output_device,
             std::int64_t dim, const SharedLedger& ledger) {
  SB_CHECK(!outputs.empty(), "gather: no outputs were given");
  const Value& first = outputs[0];
  for (const Value& output : outputs) {
    const bool alike =
        std::string(output.kind_name()) == first.kind_name() &&
        (!first.is_list() || output.list().size() == first.list().size()) &&
        (!first.is_dictionary() ||
         output.dictionary().size() == first.dictionary().size());
    SB_CHECK(alike, "gather: one replica returned ", first.kind_name(),
             ", another ", output.kind_name(), "; all return the same entries");
  }
  // Joins the outputs' entries of one place.
  auto entries = [&](const auto& entry_of) {
    std::vector<Value> values;
    for (const Value& output : outputs) values.push_back(entry_of(output));
    return gather(values, output_device, dim, ledger);
  };
  if (first.is_tensor()) {
    Tensors parts;
    for (const Value& output : outputs) parts.push_back(output.tensor());
    return gather_tensor(std::move(parts), output_device, dim, ledger);
  }
  if (first.is_list()) {
    Value::List list;
    for (std::size_t i = 0; i < first.list().size(); ++i) {
      list.push_back(entries([i](const Value& output) { return output[i]; }));
    }
    return list;
  }
  if (first.is_dictionary()) {
    Value::Dictionary dictionary;
    for (const auto& [key, unused] : first.dictionary()) {
      dictionary[key] =
          entries([&key = key](const Value& output) { return output[key]; });
    }
    return dictionary;
  }
  for (const Value& output : outputs) {
    SB_CHECK(output.object() == nullptr,
             "gather: outputs are tensors, lists or dictionaries of them; "
             "other objects cannot be joined");
  }
  return Value();
}

}  // namespace shardbook::data_parallel
