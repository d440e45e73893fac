#pragma once

// The checks of every process group before it calls a backend.

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "comm/ledger.h"
#include "comm/process_group.h"
#include "core/check.h"
#include "core/tensor.h"

namespace shardbook::internal {

// Up to this size a send copies its message and is complete.
constexpr std::int64_t kEagerBytes = 64 << 10;

// 0 to size - 1.
inline std::vector<int> ranks_below(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// True when two buffers share memory, which a call allows only in place.
inline bool overlap(const Tensor& a, const Tensor& b) {
  const auto* a_begin = static_cast<const char*>(a.raw());
  const auto* b_begin = static_cast<const char*>(b.raw());
  if (a_begin == nullptr || b_begin == nullptr) return false;
  return a_begin < b_begin + b.bytes() && b_begin < a_begin + a.bytes();
}

inline std::int64_t sum_of(const std::vector<std::int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

// Checks of one call; every message begins with its name and place.
class Arguments {
 public:
  Arguments(CommOp op, const ProcessGroup& group)
      : name_(comm_op_name(op)), group_(group), size_(group.size()) {}

  void defined(const Tensor& tensor, const char* what) const {
    SB_CHECK(tensor.defined(), name_, " ", where(), ": the ", what,
             " is an undefined tensor");
  }

  void pair(const Tensor& output, const Tensor& input) const {
    defined(output, "output");
    defined(input, "input");
    SB_CHECK(output.dtype() == input.dtype(), name_, " ", where(),
             ": the output is ", dtype_name(output.dtype()), ", the input is ",
             dtype_name(input.dtype()), "; both must have one dtype");
    SB_CHECK(output.is_meta() == input.is_meta(), name_, " ", where(),
             ": the output is on ", output.device().name(), ", the input on ",
             input.device().name(), "; both are on meta devices or neither is");
  }

  void root(int value) const {
    SB_CHECK(value >= 0 && value < size_, name_, " ", where(), ": root ", value,
             " is not a rank of the group; give 0 to ", size_ - 1);
  }

  void peer(int value, int rank, const char* what) const {
    SB_CHECK(value >= 0 && value < size_, name_, " ", where(), ": ", what, " ",
             value, " is not a rank of the group; give 0 to ", size_ - 1);
    SB_CHECK(value != rank, name_, " ", where(),
             ": a rank does not exchange messages with itself; copy instead");
  }

  // `whole` holds one piece of the size of `piece` per rank.
  void pieces(const Tensor& whole, const char* whole_name, const Tensor& piece,
              const char* piece_name) const {
    SB_CHECK(whole.numel() == piece.numel() * size_, name_, " ", where(),
             ": the ", whole_name, " has ", whole.numel(), " elements and the ",
             piece_name, " ", piece.numel(), "; the ", whole_name,
             " must have ", size_, " times as many (", piece.numel() * size_,
             ")");
  }

  // `piece` does not overlap `whole`, or is exactly its piece `index`.
  void in_place(const Tensor& whole, const Tensor& piece, int index) const {
    if (!overlap(whole, piece)) return;
    const auto* begin = static_cast<const char*>(whole.raw());
    SB_CHECK(piece.raw() == begin + index * piece.bytes(), name_, " ", where(),
             ": the buffers overlap; in place, the small one is exactly piece ",
             index, " of the large one");
  }

  void apart(const Tensor& output, const Tensor& input) const {
    SB_CHECK(!overlap(output, input), name_, " ", where(),
             ": output and input overlap; this operation is never in place");
  }

  void counts(const std::vector<std::int64_t>& counts, const Tensor& tensor,
              const char* what) const {
    SB_CHECK(static_cast<int>(counts.size()) == size_, name_, " ", where(),
             ": ", counts.size(), " ", what, " counts; give one per rank (",
             size_, ")");
    for (std::int64_t count : counts) {
      SB_CHECK(count >= 0, name_, " ", where(), ": a ", what, " count is ",
               count, "; counts are not negative");
    }
    SB_CHECK(sum_of(counts) == tensor.numel(), name_, " ", where(), ": the ",
             what, " counts add up to ", sum_of(counts), " and the buffer has ",
             tensor.numel(), " elements");
  }

 private:
  std::string where() const { return group_.where(); }

  const char* name_;
  const ProcessGroup& group_;
  int size_;
};

}  // namespace shardbook::internal
