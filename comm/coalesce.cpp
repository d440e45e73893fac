#include "comm/coalesce.h"

#include <algorithm>

namespace shardbook {
namespace {

std::int64_t bytes_of(const Tensors& tensors) {
  std::int64_t bytes = 0;
  for (const Tensor& tensor : tensors) bytes += tensor.bytes();
  return bytes;
}

}  // namespace

std::vector<Tensors> coalesce(const Tensors& tensors, std::int64_t max_bytes) {
  std::vector<Tensors> pieces;
  for (const Tensor& tensor : tensors) {
    const bool fits = !pieces.empty() &&
                      pieces.back()[0].dtype() == tensor.dtype() &&
                      pieces.back()[0].device() == tensor.device() &&
                      bytes_of(pieces.back()) + tensor.bytes() <= max_bytes;
    if (!fits) pieces.emplace_back();
    pieces.back().push_back(tensor);
  }
  return pieces;
}

void broadcast_coalesced(ProcessGroup& group, const Tensors& tensors, int root,
                         const std::string& label, std::int64_t max_bytes) {
  if (group.size() == 1) return;
  for (const Tensors& piece : coalesce(tensors, max_bytes)) {
    if (piece.size() == 1) {
      group.broadcast(piece[0], root, label).wait();
      continue;
    }
    MemoryScope kind(MemoryKind::kCommunication);
    std::int64_t numel = 0;
    for (const Tensor& tensor : piece) numel += tensor.numel();
    const Tensor flat = Tensor::empty({numel}, piece[0].options());
    auto for_each_part = [&](auto&& copy) {
      std::int64_t offset = 0;
      for (const Tensor& tensor : piece) {
        copy(tensor, flat.flat_view(offset, tensor.shape()));
        offset += tensor.numel();
      }
    };
    if (group.rank() == root) {
      for_each_part([](const Tensor& tensor, const Tensor& part) {
        part.copy_from(tensor);
      });
    }
    group.broadcast(flat, root, label).wait();
    if (group.rank() != root) {
      for_each_part([](const Tensor& tensor, const Tensor& part) {
        tensor.copy_from(part);
      });
    }
  }
}

}  // namespace shardbook
