#include "comm/gloo/collectives.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "comm/internal/reduce.h"
#include "core/check.h"

namespace shardbook::internal {
namespace {

// Steps keep the messages of one call apart.
constexpr std::uint64_t kContributions = 0;
constexpr std::uint64_t kResults = std::uint64_t{1} << 32;

void wait_all(const Channel& channel, std::vector<Message>& messages) {
  for (Message& message : messages) message.wait(channel.info);
  messages.clear();
}

void copy(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0 && to != from) std::memmove(to, from, bytes);
}

char* at(void* data, std::size_t offset) {
  return static_cast<char*>(data) + offset;
}
const char* at(const void* data, std::size_t offset) {
  return static_cast<const char*>(data) + offset;
}

// The other ranks, beginning after this one, so that not all turn to rank 0.
std::vector<int> peers_of(const Channel& channel) {
  std::vector<int> peers;
  for (int i = 1; i < channel.size(); ++i) {
    peers.push_back((channel.rank + i) % channel.size());
  }
  return peers;
}

struct Range {
  std::int64_t begin = 0;
  std::int64_t count = 0;
};

// Sums pieces: piece r of every rank's input meets at rank r.
//
//   segment   0    1    2    3    4
//   post      ################           contributions on their way
//   reduce         ##                    all P are here: added in rank order
//
class PieceReduction {
 public:
  PieceReduction(const Channel& channel, DType dtype, ReduceOp op,
                 const void* input, std::vector<Range> pieces)
      : channel_(channel),
        dtype_(dtype),
        op_(op),
        input_(input),
        pieces_(std::move(pieces)),
        peers_(peers_of(channel)),
        element_bytes_(dtype_bytes(dtype)) {
    const std::size_t segment_bytes =
        std::max(kSmallestSegmentBytes, kRoundBytes / pieces_.size());
    segment_ = static_cast<std::int64_t>(segment_bytes / element_bytes_);
    std::int64_t longest = 0;
    for (const Range& piece : pieces_) longest = std::max(longest, piece.count);
    segments_ = (longest + segment_ - 1) / segment_;
    slot_bytes_ =
        static_cast<std::size_t>(std::min(segment_, pieces_[own()].count)) *
        element_bytes_;
    arriving_.resize(kWindow);
    inbox_.reset(new char[kWindow * peers_.size() * slot_bytes_ + 1]);
  }

  std::int64_t segments() const { return segments_; }

  // Part `segment` of a rank's piece; empty behind its end.
  Range part(int rank, std::int64_t segment) const {
    const Range piece = pieces_[static_cast<std::size_t>(rank)];
    const std::int64_t begin = std::min(segment * segment_, piece.count);
    const std::int64_t end = std::min(begin + segment_, piece.count);
    return {piece.begin + begin, end - begin};
  }

  void post(std::int64_t segment) {
    if (segment >= segments_) return;
    const Range mine = part(channel_.rank, segment);
    auto& arriving = arriving_[static_cast<std::size_t>(segment) % kWindow];
    arriving.clear();
    for (std::size_t i = 0; i < peers_.size() && mine.count > 0; ++i) {
      arriving.push_back(channel_.recv(peers_[i], kContributions + segment,
                                       inbox(segment, i), bytes(mine)));
    }
    for (const int peer : peers_) {
      const Range theirs = part(peer, segment);
      if (theirs.count == 0) continue;
      leaving_.push_back(channel_.send(peer, kContributions + segment,
                                       address(theirs), bytes(theirs)));
    }
  }

  // Writes this rank's part of a segment. `output` may be its place in the
  // input.
  void reduce(std::int64_t segment, void* output) {
    const Range mine = part(channel_.rank, segment);
    if (mine.count == 0) return;
    wait_all(channel_, arriving_[static_cast<std::size_t>(segment) % kWindow]);
    std::vector<const void*> inputs(pieces_.size());
    inputs[own()] = address(mine);
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      inputs[static_cast<std::size_t>(peers_[i])] = inbox(segment, i);
    }
    reduce_buffers(dtype_, op_, inputs.data(), channel_.size(), &output, 1,
                   mine.count);
  }

  void finish() { wait_all(channel_, leaving_); }

  std::size_t bytes(const Range& range) const {
    return static_cast<std::size_t>(range.count) * element_bytes_;
  }
  const char* address(const Range& range) const {
    return at(input_, static_cast<std::size_t>(range.begin) * element_bytes_);
  }

  static constexpr std::int64_t kWindow = 4;

 private:
  // The contributions of all ranks to one segment. Smaller segments lose more
  // by wake-ups than they gain from the cache.
  static constexpr std::size_t kRoundBytes = 4 << 20;
  static constexpr std::size_t kSmallestSegmentBytes = 128 << 10;

  std::size_t own() const { return static_cast<std::size_t>(channel_.rank); }
  char* inbox(std::int64_t segment, std::size_t peer) {
    const auto slot = static_cast<std::size_t>(segment % kWindow);
    return inbox_.get() + (slot * peers_.size() + peer) * slot_bytes_;
  }

  const Channel& channel_;
  DType dtype_;
  ReduceOp op_;
  const void* input_;
  std::vector<Range> pieces_;
  std::vector<int> peers_;
  std::size_t element_bytes_;
  std::int64_t segment_ = 1;  // elements
  std::int64_t segments_ = 0;
  std::size_t slot_bytes_ = 0;
  std::unique_ptr<char[]> inbox_;               // not initialised
  std::vector<std::vector<Message>> arriving_;  // by segment mod kWindow
  std::vector<Message> leaving_;
};

// Few bytes: every rank sends everything to every other and adds by itself.
void all_reduce_small(const Channel& channel, DType dtype, ReduceOp op,
                      void* data, std::int64_t numel) {
  const std::size_t bytes =
      static_cast<std::size_t>(numel) * dtype_bytes(dtype);
  std::vector<char> inbox(bytes * channel.ranks.size());
  std::vector<const void*> inputs(channel.ranks.size(), data);
  std::vector<Message> messages;
  for (const int peer : peers_of(channel)) {
    char* place = inbox.data() + static_cast<std::size_t>(peer) * bytes;
    inputs[static_cast<std::size_t>(peer)] = place;
    messages.push_back(channel.recv(peer, 0, place, bytes));
  }
  for (const int peer : peers_of(channel)) {
    messages.push_back(channel.send(peer, 0, data, bytes));
  }
  wait_all(channel, messages);
  reduce_buffers(dtype, op, inputs.data(), channel.size(), &data, 1, numel);
}

}  // namespace

Message Channel::send(int to, std::uint64_t step, const void* data,
                      std::size_t bytes) const {
  return Message::send(*world, info, ranks[static_cast<std::size_t>(to)],
                       slot + step, data, bytes);
}

Message Channel::recv(int from, std::uint64_t step, void* data,
                      std::size_t bytes) const {
  return Message::recv(*world, info, ranks[static_cast<std::size_t>(from)],
                       slot + step, data, bytes);
}

void gloo_all_reduce(const Channel& channel, DType dtype, ReduceOp op,
                     void* data, std::int64_t numel) {
  constexpr std::size_t kSmallBytes = 16 << 10;
  if (numel == 0) return gloo_barrier(channel);
  if (static_cast<std::size_t>(numel) * dtype_bytes(dtype) <= kSmallBytes) {
    return all_reduce_small(channel, dtype, op, data, numel);
  }
  const std::int64_t size = channel.size();
  std::vector<Range> pieces;
  for (std::int64_t r = 0; r < size; ++r) {
    const std::int64_t begin = numel * r / size;
    pieces.push_back({begin, numel * (r + 1) / size - begin});
  }
  PieceReduction reduction(channel, dtype, op, data, std::move(pieces));
  const std::vector<int> peers = peers_of(channel);
  const auto place = [&](const Range& range) {
    return const_cast<char*>(reduction.address(range));
  };

  // A segment's result arrives where our contribution to it lies; its owner
  // sends it after that contribution has arrived, so nothing is overwritten
  // early.
  std::vector<Message> results;
  const auto post = [&](std::int64_t segment) {
    reduction.post(segment);
    for (const int peer : peers) {
      const Range theirs = reduction.part(peer, segment);
      if (theirs.count == 0) continue;
      results.push_back(channel.recv(peer, kResults + segment, place(theirs),
                                     reduction.bytes(theirs)));
    }
  };
  for (std::int64_t i = 0; i < PieceReduction::kWindow; ++i) post(i);
  for (std::int64_t i = 0; i < reduction.segments(); ++i) {
    const Range mine = reduction.part(channel.rank, i);
    reduction.reduce(i, place(mine));
    for (const int peer : peers) {
      if (mine.count == 0) break;
      results.push_back(
          channel.send(peer, kResults + i, place(mine), reduction.bytes(mine)));
    }
    post(i + PieceReduction::kWindow);
  }
  reduction.finish();
  wait_all(channel, results);
}

void gloo_reduce_scatter(const Channel& channel, DType dtype, ReduceOp op,
                         void* output, const void* input, std::int64_t piece) {
  if (piece == 0) return gloo_barrier(channel);
  std::vector<Range> pieces;
  for (int r = 0; r < channel.size(); ++r) pieces.push_back({r * piece, piece});
  PieceReduction reduction(channel, dtype, op, input, std::move(pieces));
  for (std::int64_t i = 0; i < PieceReduction::kWindow; ++i) reduction.post(i);
  for (std::int64_t i = 0; i < reduction.segments(); ++i) {
    const Range mine = reduction.part(channel.rank, i);
    const Range first = reduction.part(channel.rank, 0);
    reduction.reduce(
        i, at(output, static_cast<std::size_t>(mine.begin - first.begin) *
                          dtype_bytes(dtype)));
    reduction.post(i + PieceReduction::kWindow);
  }
  reduction.finish();
}

void gloo_reduce(const Channel& channel, DType dtype, ReduceOp op, void* data,
                 std::int64_t numel, int root) {
  if (numel == 0) return gloo_barrier(channel);
  // One piece, the root's.
  std::vector<Range> pieces(channel.ranks.size());
  pieces[static_cast<std::size_t>(root)] = {0, numel};
  PieceReduction reduction(channel, dtype, op, data, std::move(pieces));
  for (std::int64_t i = 0; i < PieceReduction::kWindow; ++i) reduction.post(i);
  for (std::int64_t i = 0; i < reduction.segments(); ++i) {
    const Range mine = reduction.part(channel.rank, i);
    reduction.reduce(i, const_cast<char*>(reduction.address(mine)));
    reduction.post(i + PieceReduction::kWindow);
  }
  reduction.finish();
}

void gloo_all_gather(const Channel& channel, void* output, const void* input,
                     std::size_t piece_bytes) {
  if (piece_bytes == 0) return gloo_barrier(channel);
  std::vector<Message> messages;
  for (const int peer : peers_of(channel)) {
    messages.push_back(channel.recv(
        peer, 0, at(output, static_cast<std::size_t>(peer) * piece_bytes),
        piece_bytes));
  }
  for (const int peer : peers_of(channel)) {
    messages.push_back(channel.send(peer, 0, input, piece_bytes));
  }
  copy(at(output, static_cast<std::size_t>(channel.rank) * piece_bytes), input,
       piece_bytes);
  wait_all(channel, messages);
}

void gloo_broadcast(const Channel& channel, void* data, std::size_t bytes,
                    int root) {
  constexpr std::size_t kSmallBytes = 64 << 10;
  if (bytes == 0) return gloo_barrier(channel);
  const bool is_root = channel.rank == root;
  const auto size = static_cast<std::size_t>(channel.size());
  std::vector<Message> messages;
  if (bytes <= kSmallBytes || size == 2) {
    if (!is_root) messages.push_back(channel.recv(root, 0, data, bytes));
    for (const int peer : peers_of(channel)) {
      if (is_root) messages.push_back(channel.send(peer, 0, data, bytes));
    }
    return wait_all(channel, messages);
  }

  // Many bytes: the root scatters pieces, and all pass their piece on.
  const auto begin = [&](int rank) {
    return bytes * static_cast<std::size_t>(rank) / size;
  };
  const auto piece_bytes = [&](int rank) {
    return begin(rank + 1) - begin(rank);
  };
  const int rank = channel.rank;
  for (const int peer : peers_of(channel)) {
    if (is_root) {
      messages.push_back(
          channel.send(peer, 0, at(data, begin(peer)), piece_bytes(peer)));
    } else {
      // The root's own piece comes from the root, as the others' do.
      messages.push_back(
          channel.recv(peer, 1, at(data, begin(peer)), piece_bytes(peer)));
    }
  }
  if (!is_root) {
    channel.recv(root, 0, at(data, begin(rank)), piece_bytes(rank))
        .wait(channel.info);
  }
  for (const int peer : peers_of(channel)) {
    if (peer == root) continue;
    messages.push_back(
        channel.send(peer, 1, at(data, begin(rank)), piece_bytes(rank)));
  }
  wait_all(channel, messages);
}

void gloo_scatter(const Channel& channel, void* output, const void* input,
                  std::size_t piece_bytes, int root) {
  if (piece_bytes == 0) return gloo_barrier(channel);
  if (channel.rank != root) {
    channel.recv(root, 0, output, piece_bytes).wait(channel.info);
    return;
  }
  const auto piece = [&](int rank) {
    return at(input, static_cast<std::size_t>(rank) * piece_bytes);
  };
  std::vector<Message> messages;
  for (const int peer : peers_of(channel)) {
    messages.push_back(channel.send(peer, 0, piece(peer), piece_bytes));
  }
  copy(output, piece(root), piece_bytes);
  wait_all(channel, messages);
}

void gloo_gather(const Channel& channel, void* output, const void* input,
                 std::size_t piece_bytes, int root) {
  if (piece_bytes == 0) return gloo_barrier(channel);
  if (channel.rank != root) {
    channel.send(root, 0, input, piece_bytes).wait(channel.info);
    return;
  }
  const auto piece = [&](int rank) {
    return at(output, static_cast<std::size_t>(rank) * piece_bytes);
  };
  std::vector<Message> messages;
  for (const int peer : peers_of(channel)) {
    messages.push_back(channel.recv(peer, 0, piece(peer), piece_bytes));
  }
  copy(piece(root), input, piece_bytes);
  wait_all(channel, messages);
}

void gloo_all_to_all(const Channel& channel, void* output, const void* input,
                     const std::vector<std::int64_t>& send_counts,
                     const std::vector<std::int64_t>& recv_counts,
                     std::size_t element_bytes) {
  const std::vector<int> peers = peers_of(channel);
  const auto index = [](int rank) { return static_cast<std::size_t>(rank); };

  // Compare the counts first: data of another size must not arrive.
  std::vector<std::int64_t> announced(recv_counts.size());
  std::vector<Message> messages;
  for (const int peer : peers) {
    messages.push_back(channel.recv(peer, 0, &announced[index(peer)], 8));
  }
  for (const int peer : peers) {
    messages.push_back(channel.send(peer, 0, &send_counts[index(peer)], 8));
  }
  wait_all(channel, messages);
  for (const int peer : peers) {
    SB_CHECK(announced[index(peer)] == recv_counts[index(peer)],
             channel.info.text, ": rank ", channel.ranks[index(peer)],
             " sends ", announced[index(peer)], " elements to rank ",
             channel.ranks[index(channel.rank)], ", which expects ",
             recv_counts[index(peer)]);
  }

  std::vector<std::size_t> send_at(1, 0), recv_at(1, 0);
  for (const std::int64_t count : send_counts) {
    send_at.push_back(send_at.back() +
                      static_cast<std::size_t>(count) * element_bytes);
  }
  for (const std::int64_t count : recv_counts) {
    recv_at.push_back(recv_at.back() +
                      static_cast<std::size_t>(count) * element_bytes);
  }
  for (const int peer : peers) {
    const std::size_t i = index(peer), bytes = recv_at[i + 1] - recv_at[i];
    if (bytes == 0) continue;
    messages.push_back(channel.recv(peer, 1, at(output, recv_at[i]), bytes));
  }
  for (const int peer : peers) {
    const std::size_t i = index(peer), bytes = send_at[i + 1] - send_at[i];
    if (bytes == 0) continue;
    messages.push_back(channel.send(peer, 1, at(input, send_at[i]), bytes));
  }
  const std::size_t self = index(channel.rank);
  copy(at(output, recv_at[self]), at(input, send_at[self]),
       send_at[self + 1] - send_at[self]);
  wait_all(channel, messages);
}

void gloo_barrier(const Channel& channel) {
  char out = 0, in = 0;
  const int size = channel.size();
  std::uint64_t step = 0;
  for (int distance = 1; distance < size; distance *= 2, ++step) {
    Message received =
        channel.recv((channel.rank + size - distance) % size, step, &in, 1);
    Message sent =
        channel.send((channel.rank + distance) % size, step, &out, 1);
    received.wait(channel.info);
    sent.wait(channel.info);
  }
}

}  // namespace shardbook::internal
