#include "comm/shape_group.h"

#include <algorithm>

#include "comm/internal/arguments.h"
#include "core/check.h"

namespace shardbook {
namespace {

// The base class moves no tensor on a meta device, so only real data get here.
[[noreturn]] Work refuse(const CommCall& call, const std::string& name) {
  SB_FAIL(call_text(call), " over '", name,
          "': this group has no peers; give it tensors on meta devices");
}

}  // namespace

ShapeGroup::ShapeGroup(int rank, int size, const std::string& name)
    : ProcessGroup(rank, internal::ranks_below(size), name) {}

std::vector<std::string> ShapeGroup::exchange(const std::string& text) {
  return std::vector<std::string>(static_cast<std::size_t>(size()), text);
}

Work ShapeGroup::do_collective(const CommCall& call, const CommBuffers&) {
  return refuse(call, name());
}
Work ShapeGroup::do_send(const Tensor&, const CommCall& call) {
  return refuse(call, name());
}
Work ShapeGroup::do_recv(const Tensor&, const CommCall& call) {
  return refuse(call, name());
}
std::shared_ptr<ProcessGroup> ShapeGroup::do_subgroup(
    const std::vector<int>& members, const std::string& name) {
  const auto mine = std::find(members.begin(), members.end(), rank());
  return std::make_shared<ShapeGroup>(static_cast<int>(mine - members.begin()),
                                      static_cast<int>(members.size()), name);
}

}  // namespace shardbook
