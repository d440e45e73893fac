#include "chapters/02_ddp/bill.h"

#include <algorithm>

#include "comm/coalesce.h"

namespace shardbook::ddp {
namespace {

bool finds_unused(const BillSizes& s) {
  return s.ddp.find_unused_parameters && !s.ddp.static_graph;
}

}  // namespace

BillSizes bill_sizes(Module& module, const DdpOptions& ddp, int ranks,
                     std::int64_t steps, std::optional<DType> wire) {
  const Tensors parameters = module.parameters();
  BillSizes sizes;
  sizes.ranks = ranks;
  sizes.steps = steps;
  sizes.elements = static_cast<double>(module.num_parameters());
  sizes.tensors = static_cast<double>(parameters.size());
  const DType dtype = parameters.at(0).dtype();
  sizes.element_bytes = static_cast<double>(dtype_bytes(dtype));
  sizes.first_buffer_bytes =
      static_cast<double>(coalescing_buffer_bytes(parameters));
  if (wire && *wire != dtype) {
    sizes.wire_bytes = static_cast<double>(dtype_bytes(*wire));
  }
  sizes.ddp = ddp;
  return sizes;
}

double predicted_bytes(const BillSizes& s) {
  if (s.ranks == 1) return 0;
  const auto steps = static_cast<double>(s.steps);
  // Broadcasts: the weights once, and the order of the buckets
  double broadcast = s.elements * s.element_bytes;
  if (s.steps >= 2 && !finds_unused(s)) broadcast += 4 * s.tensors;
  // Each step all-reduces the gradients, and a map of the parameters in use
  const double wire = s.wire_bytes > 0 ? s.wire_bytes : s.element_bytes;
  double all_reduced = steps * s.elements * wire;
  if (finds_unused(s)) all_reduced += steps * 4 * s.tensors;
  if (s.ddp.static_graph && s.steps >= 1) all_reduced += 4 * s.tensors;
  return (s.ranks - 1) * (broadcast + 2 * all_reduced) / s.ranks;
}

double communication_bytes(const BillSizes& s, double sent_beside) {
  // Buckets, or the buffer that the first weights travel in
  const double buckets =
      s.ddp.gradient_as_bucket_view ? 0 : s.elements * s.element_bytes;
  const bool counts_uses = finds_unused(s) || s.ddp.static_graph;
  const double usage = counts_uses ? 4 * s.tensors : 0;
  double peak = buckets;
  if (s.steps >= 1) {
    peak = buckets + usage + sent_beside + s.elements * s.wire_bytes;
  }
  if (s.ranks > 1) {
    peak = std::max(peak, s.first_buffer_bytes);
    if (s.steps >= 2 && !finds_unused(s)) {
      peak = std::max(peak, buckets + usage + 4 * s.tensors);
    }
  }
  return peak;
}

}  // namespace shardbook::ddp
