#include "comm/gloo/collectives.h"

#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/alltoall.h>
#include <gloo/alltoallv.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/gather.h>
#include <gloo/scatter.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <memory>

#include "comm/internal/reduce.h"
#include "core/check.h"

namespace shardbook::internal {
namespace {

// Gloo's options ask for mutable data even where they only read it.
char* bytes_of(const void* data) {
  return const_cast<char*>(static_cast<const char*>(data));
}

char* at(const Tensor& tensor, std::int64_t element) {
  return bytes_of(tensor.raw()) +
         static_cast<std::size_t>(element) * dtype_bytes(tensor.dtype());
}

std::size_t size_in_bytes(const Tensor& tensor) {
  return static_cast<std::size_t>(tensor.bytes());
}

auto reduce_function(DType dtype, ReduceOp op) {
  return [dtype, op](void* out, const void* a, const void* b, std::size_t n) {
    reduce_buffers(dtype, op, {a, b}, {out}, static_cast<std::int64_t>(n));
  };
}

// Calls set(T*) with `data`, where T is as wide as dtype.
template <typename Set>
void with_width(DType dtype, void* data, Set&& set) {
  switch (dtype_bytes(dtype)) {
    case 2:
      return set(static_cast<std::uint16_t*>(data));
    case 4:
      return set(static_cast<std::uint32_t*>(data));
    default:
      return set(static_cast<std::uint64_t*>(data));
  }
}

struct Range {
  const void* data = nullptr;
  std::size_t bytes = 0;
};
using RangeOf = std::function<Range(int rank)>;

// Calls post(peer, range) for all ranges that are not empty, beginning with the
// next rank: otherwise all ranks would begin with rank 0.
template <typename Post>
void for_peers(const Channel& channel, const RangeOf& range_of, Post&& post) {
  for (int i = 1; i < channel.size(); ++i) {
    const int peer = (channel.rank + i) % channel.size();
    const Range range = range_of(peer);
    if (range.bytes > 0) post(peer, range);
  }
}

using Messages = std::vector<Message>;

void post_recvs(const Channel& channel, std::uint64_t step,
                const RangeOf& range_of, Messages& messages) {
  for_peers(channel, range_of, [&](int peer, const Range& to) {
    messages.push_back(channel.recv(peer, step, bytes_of(to.data), to.bytes));
  });
}

void post_sends(const Channel& channel, std::uint64_t step,
                const RangeOf& range_of, Messages& messages) {
  for_peers(channel, range_of, [&](int peer, const Range& from) {
    messages.push_back(channel.send(peer, step, from.data, from.bytes));
  });
}

void wait_all(Messages& messages) {
  for (Message& message : messages) message.wait();
  messages.clear();
}

// All ranks' contributions to one range of elements meet here.
class Meeting {
 public:
  // Rank r gets source(r) from this rank.
  void post(const Channel& channel, std::uint64_t step, const RangeOf& source) {
    const Range own = source(channel.rank);
    const std::size_t size = channel.ranks.size();
    bytes_ = own.bytes;
    // Not initialised; no later range is longer than the first.
    if (!inbox_) inbox_.reset(new char[size * own.bytes]);
    inputs_.assign(size, own.data);
    const auto place = [&](int rank) {
      const auto r = static_cast<std::size_t>(rank);
      inputs_[r] = inbox_.get() + r * own.bytes;
      return Range{inputs_[r], own.bytes};
    };
    post_recvs(channel, step, place, messages_);
    post_sends(channel, step, source, messages_);
  }

  // Adds in rank order. `output` may be a source.
  void reduce(DType dtype, ReduceOp op, void* output) {
    wait_all(messages_);
    reduce_buffers(dtype, op, inputs_, {output},
                   static_cast<std::int64_t>(bytes_ / dtype_bytes(dtype)));
  }

 private:
  std::size_t bytes_ = 0;
  std::unique_ptr<char[]> inbox_;
  std::vector<const void*> inputs_;
  Messages messages_;  // end first: they write into inbox_
};

// Rank r sums all ranks' source(r), each as long as `output`, into `output`,
// which may be a source. Ranks without a source sum nothing.
//
//   segment   0    1    2    3    4
//   post      ################           contributions on their way
//   reduce         ##                    all P are here: added
//
void reduce_in_segments(const Channel& channel, const Tensor& output,
                        ReduceOp op,
                        const std::function<const char*(int)>& source) {
  // The contributions of all ranks to one segment. Smaller segments lose more
  // by wake-ups than they gain from the cache.
  constexpr std::size_t kRoundBytes = 4 << 20;
  constexpr std::size_t kSmallestSegmentBytes = 128 << 10;
  const DType dtype = output.dtype();
  const auto segment = static_cast<std::int64_t>(
      std::max(kSmallestSegmentBytes, kRoundBytes / channel.ranks.size()) /
      dtype_bytes(dtype));
  std::array<Meeting, 4> window;
  const auto ahead = static_cast<std::int64_t>(window.size()) * segment;
  const auto meeting_of = [&](std::int64_t begin) -> Meeting& {
    return window[static_cast<std::size_t>(begin / segment) % window.size()];
  };
  const auto post = [&](std::int64_t begin) {
    if (begin >= output.numel()) return;
    const std::int64_t end = std::min(begin + segment, output.numel());
    const auto offset = static_cast<std::size_t>(begin) * dtype_bytes(dtype);
    const auto bytes =
        static_cast<std::size_t>(end - begin) * dtype_bytes(dtype);
    meeting_of(begin).post(
        channel, static_cast<std::uint64_t>(begin), [&](int rank) {
          const char* data = source(rank);
          return data == nullptr ? Range() : Range{data + offset, bytes};
        });
  };
  for (std::int64_t i = 0; i < ahead; i += segment) post(i);
  for (std::int64_t i = 0; i < output.numel(); i += segment) {
    meeting_of(i).reduce(dtype, op, at(output, i));
    post(i + ahead);
  }
}

// Every rank sums a piece and sends it to all; with few elements, every rank
// sums all of them.
void all_reduce_directly(const Channel& channel, const Tensor& tensor,
                         ReduceOp op) {
  constexpr std::int64_t kFew = 4096;
  const std::int64_t numel = tensor.numel();
  const std::int64_t size = numel <= kFew ? 1 : channel.size();
  const auto begin = [&](std::int64_t part) { return numel * part / size; };
  const auto piece = [&](int rank) {
    const std::int64_t part = rank % size;
    const char* data = at(tensor, begin(part));
    return Range{data,
                 static_cast<std::size_t>(at(tensor, begin(part + 1)) - data)};
  };
  const Range own = piece(channel.rank);
  // A sum overwrites this rank's contribution to it: its owner sends it only
  // after that contribution has arrived.
  Messages sums;
  if (size > 1) post_recvs(channel, 1, piece, sums);
  Meeting meeting;
  meeting.post(channel, 0, piece);
  meeting.reduce(tensor.dtype(), op, bytes_of(own.data));
  const auto sum = [&](int) { return own; };
  if (size > 1) post_sends(channel, 1, sum, sums);
  wait_all(sums);
}

// Below this size Gloo's rings are slower than messages from every rank to every
// other: with four ranks on two cores, an all_reduce by the ring takes 2 to 6
// times as long at 64 KiB, 3 to 5 times at 1 MiB, 1.2 times at 4 MiB.
constexpr std::size_t kRingBytes = 8 << 20;

void all_reduce(const Channel& channel, const Tensor& tensor, ReduceOp op) {
  if (size_in_bytes(tensor) < kRingBytes) {
    return all_reduce_directly(channel, tensor, op);
  }
  ::gloo::AllreduceOptions options(channel.context());
  with_width(tensor.dtype(), tensor.raw(), [&](auto* data) {
    options.setOutput(data, static_cast<std::size_t>(tensor.numel()));
  });
  options.setReduceFunction(reduce_function(tensor.dtype(), op));
  // Gloo's segments of 1 MiB take 1.2 times as long.
  options.setMaxSegmentSize(4 << 20);
  ::gloo::allreduce(options);
}

void reduce_scatter(const Channel& channel, const Tensor& output,
                    const Tensor& input, ReduceOp op) {
  reduce_in_segments(channel, output, op, [&](int rank) {
    return at(input, rank * output.numel());
  });
}

void reduce(const Channel& channel, const Tensor& tensor, ReduceOp op,
            int root) {
  reduce_in_segments(channel, tensor, op, [&](int rank) {
    return rank == root ? at(tensor, 0) : nullptr;
  });
}

void all_gather(const Channel& channel, const Tensor& output,
                const Tensor& input) {
  const auto piece = [&](int rank) {
    return Range{at(output, rank * input.numel()), size_in_bytes(input)};
  };
  const Range own = piece(channel.rank);
  const bool in_place = own.data == input.raw();
  if (size_in_bytes(output) < kRingBytes) {
    if (!in_place) std::memcpy(bytes_of(own.data), input.raw(), own.bytes);
    Messages messages;
    post_recvs(channel, 0, piece, messages);
    post_sends(
        channel, 0, [&](int) { return own; }, messages);
    return wait_all(messages);
  }
  ::gloo::AllgatherOptions options(channel.context());
  if (!in_place) options.setInput(at(input, 0), own.bytes);
  options.setOutput(at(output, 0), size_in_bytes(output));
  ::gloo::allgather(options);
}

void broadcast(const Channel& channel, const Tensor& tensor, int root) {
  ::gloo::BroadcastOptions options(channel.context());
  options.setOutput(at(tensor, 0), size_in_bytes(tensor));
  options.setRoot(root);
  ::gloo::broadcast(options);
}

void scatter(const Channel& channel, const Tensor& output, const Tensor& input,
             int root) {
  ::gloo::ScatterOptions options(channel.context());
  if (channel.rank == root) {
    std::vector<char*> pieces;
    for (int r = 0; r < channel.size(); ++r) {
      pieces.push_back(at(input, r * output.numel()));
    }
    options.setInputs(pieces, size_in_bytes(output));
  }
  options.setOutput(at(output, 0), size_in_bytes(output));
  options.setRoot(root);
  ::gloo::scatter(options);
}

void gather(const Channel& channel, const Tensor& output, const Tensor& input,
            int root) {
  ::gloo::GatherOptions options(channel.context());
  options.setInput(at(input, 0), size_in_bytes(input));
  if (channel.rank == root) {
    options.setOutput(at(output, 0), size_in_bytes(output));
  }
  options.setRoot(root);
  ::gloo::gather(options);
}

// Throws Error, before any data move, when a rank sends a different number of
// elements than its receiver expects.
void compare_counts(const Channel& channel,
                    const std::vector<std::int64_t>& send_counts,
                    const std::vector<std::int64_t>& recv_counts) {
  std::vector<std::int64_t> announced(send_counts), received(recv_counts);
  ::gloo::AlltoallOptions options(channel.context());
  options.setInput(announced.data(), announced.size());
  options.setOutput(received.data(), received.size());
  options.setTag(1);  // the data have tag 0
  ::gloo::alltoall(options);
  for (std::size_t r = 0; r < received.size(); ++r) {
    SB_CHECK(received[r] == recv_counts[r], channel.info.text, ": rank ",
             channel.ranks[r], " sends ", received[r], " elements to rank ",
             channel.ranks[static_cast<std::size_t>(channel.rank)],
             ", which expects ", recv_counts[r]);
  }
}

void all_to_all(const Channel& channel, const Tensor& output,
                const Tensor& input,
                const std::vector<std::int64_t>& send_counts,
                const std::vector<std::int64_t>& recv_counts) {
  ::gloo::AlltoallvOptions options(channel.context());
  with_width(input.dtype(), input.raw(),
             [&](auto* data) { options.setInput(data, send_counts); });
  with_width(output.dtype(), output.raw(),
             [&](auto* data) { options.setOutput(data, recv_counts); });
  ::gloo::alltoallv(options);
}

void barrier(const Channel& channel) {
  ::gloo::BarrierOptions options(channel.context());
  ::gloo::barrier(options);
}

}  // namespace

void run_collective(const Channel& channel, const CommCall& call,
                    const CommBuffers& buffers) {
  const auto& [output, input, send_counts, recv_counts] = buffers;
  const int root = call.root_or_peer;
  // A call without data ends when all ranks have called it. The counts of
  // all_to_all_v may be zero on some ranks only.
  if (call.numel == 0 && call.op != CommOp::kAllToAllV) return barrier(channel);
  switch (call.op) {
    case CommOp::kAllReduce:
      return all_reduce(channel, output, call.reduce_op);
    case CommOp::kReduceScatter:
      return reduce_scatter(channel, output, input, call.reduce_op);
    case CommOp::kReduce:
      return reduce(channel, output, call.reduce_op, root);
    case CommOp::kAllGather:
      return all_gather(channel, output, input);
    case CommOp::kBroadcast:
      return broadcast(channel, output, root);
    case CommOp::kScatter:
      return scatter(channel, output, input, root);
    case CommOp::kGather:
      return gather(channel, output, input, root);
    case CommOp::kAllToAllV:
      compare_counts(channel, send_counts, recv_counts);
      [[fallthrough]];
    default:
      return all_to_all(channel, output, input, send_counts, recv_counts);
  }
}

}  // namespace shardbook::internal
